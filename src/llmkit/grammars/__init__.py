"""Structured output: what may be asked for, and grammars in the engine."""
