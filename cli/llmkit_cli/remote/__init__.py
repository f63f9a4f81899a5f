"""Talking to a running server with the API of OpenAI, llmkit's or anybody else's."""
