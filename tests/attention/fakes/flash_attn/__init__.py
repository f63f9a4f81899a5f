"""Stands in for FlashAttention 4: what llmkit calls of it, with the same names, in plain torch on the CPU."""
