"""Worker and model runner: turn a plan into one forward pass and sampled tokens."""
