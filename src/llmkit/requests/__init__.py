"""A request: its sampling parameters, its state in the engine, and what comes out."""
