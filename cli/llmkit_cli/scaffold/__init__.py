"""`llmkit plugins new`: a plugin package, ready to be installed, tested and changed."""
