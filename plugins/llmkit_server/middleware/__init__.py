"""What every request passes on its way to the routes: plain ASGI, outermost first as `llmkit_server.app` lists it."""
