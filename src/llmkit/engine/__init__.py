"""The engine core: plan, execute, update."""
