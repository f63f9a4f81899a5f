"""The endpoints, a router for each group."""
