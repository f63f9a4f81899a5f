"""Stands in for FlashInfer: what llmkit calls of it, with the same names, in plain torch on the CPU."""
