"""Answers read into their parts: the formats of tool calls and reasoning, and what plugins need to read them."""
