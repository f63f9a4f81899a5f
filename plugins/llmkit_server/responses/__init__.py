"""/v1/responses: a chat whose turns the server can keep. Bodies → chats, answers → items, and the store."""
