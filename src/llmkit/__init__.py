"""llmkit: build and run LLM inference engines from plugins."""

__version__ = "0.1.0"
