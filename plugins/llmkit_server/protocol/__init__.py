"""What goes over the wire: bodies of requests (pydantic) and of responses (msgspec)."""
