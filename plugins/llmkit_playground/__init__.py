"""The page at `/` of the server: a chat, and a live view of the engine."""
