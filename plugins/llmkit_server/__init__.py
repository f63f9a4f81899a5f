"""The OpenAI-compatible HTTP server. `llmkit_server.app.create_app` makes the application."""
