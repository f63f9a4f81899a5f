"""Publishers of engine events."""
