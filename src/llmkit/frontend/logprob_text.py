"""The text of the tokens in log-probability entries."""

from __future__ import annotations

import msgspec

from llmkit.frontend.tokenizer import Tokenizer
from llmkit.requests.logprobs import PositionLogprobs


def with_decoded_tokens(entry: PositionLogprobs, tokenizer: Tokenizer | None) -> PositionLogprobs:
    """`entry` with every token's own text, each on its own: alternatives are no sequence. A token that holds only a
    piece of a character reads as U+FFFD; `Tokenizer.token_bytes` has its bytes."""
    if tokenizer is None:
        return entry
    texts = [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in entry.token_ids]
    return msgspec.structs.replace(entry, decoded_tokens=texts)
