"""The server's and the engine's numbers in Prometheus' form."""
