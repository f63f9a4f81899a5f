"""Log-probabilities of one position."""

from __future__ import annotations

import msgspec


class PositionLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position, natural logarithm.

    Entry 0 is the token that was sampled (or stood in the prompt); then the top-k tokens, best first. The
    distribution is the one after logit bias, masks and penalties, before temperature and truncation, so for a
    plain request it is the model's own. `ranks[i]` is 1 for the most likely token. Impossible tokens have -inf.
    decoded_tokens: every token's own text; filled in by the frontend, if there is a tokenizer.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    decoded_tokens: list[str] | None = None
