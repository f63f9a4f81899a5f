"""OpenAI's batch files: what `llmkit run-batch` is made of."""
