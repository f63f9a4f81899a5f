"""What users call: prompts in, text out."""
