"""Plans steps: who computes how many tokens, within the token budget, the sequence limit and the KV blocks."""
