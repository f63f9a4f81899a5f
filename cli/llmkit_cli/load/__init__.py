"""A load generator for servers with the API of OpenAI: what `llmkit bench serve` is made of."""
