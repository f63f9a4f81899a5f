"""Block pool, content hashes, prefix cache and the manager that maps sequences to blocks."""
