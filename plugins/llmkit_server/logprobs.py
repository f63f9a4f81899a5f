"""Log-probabilities in the forms of the two APIs.

JSON has no minus infinity: impossible alternatives are left out, and an impossible token of the prompt has FLOOR.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from llmkit.requests.logprobs import PositionLogprobs
from llmkit_server.protocol.base import PromptLogprob, PromptLogprobs
from llmkit_server.protocol.chat import TokenLogprob, TopLogprob
from llmkit_server.protocol.completions import CompletionLogprobs

if TYPE_CHECKING:
    from llmkit.frontend.tokenizer import Tokenizer

FLOOR = -9999.0


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR


def alternatives(position: PositionLogprobs, count: int) -> Iterator[int]:
    """Indices into `position` of its `count` best possible tokens; -1: of all."""
    end = len(position.token_ids) if count < 0 else min(1 + count, len(position.token_ids))
    return (i for i in range(1, end) if math.isfinite(position.logprobs[i]))


class TokenNames:
    """How tokens are written. as_ids: `token_id:7` instead of text."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def data(self, token_id: int) -> list[int] | None:
        """The bytes that the token stands for; None if that is not known."""
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))

    def text(self, token_id: int) -> str:
        """With U+FFFD where the token holds a piece of a character."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def key(self, token_id: int) -> str:
        """Different for different bytes: a piece of a character reads `bytes:\\xf0\\x9f`."""
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def pieces(self, token_ids: Iterable[int], skipped: frozenset[int]) -> Iterator[bytes]:
        """The bytes that each token adds to a text without the tokens `skipped`."""
        for token_id in token_ids:
            in_text = self._tokenizer is not None and token_id not in skipped
            yield self._tokenizer.token_bytes(token_id) if in_text and self._tokenizer else b""


def chat_logprobs(positions: Iterable[PositionLogprobs], top: int, names: TokenNames) -> list[TokenLogprob]:
    """One entry a token, with at most `top` alternatives each."""
    return [
        TokenLogprob(
            names.text(position.token_ids[0]),
            finite(position.logprobs[0]),
            names.data(position.token_ids[0]),
            [
                TopLogprob(names.text(position.token_ids[i]), position.logprobs[i], names.data(position.token_ids[i]))
                for i in alternatives(position, top)
            ],
        )
        for position in positions
    ]


class CompletionLogprobWriter:
    """The older form, token by token: it knows how much text has gone before. top: alternatives at each position, -1:
    all."""

    def __init__(self, names: TokenNames, top: int) -> None:
        self._names = names
        self._top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(
        self,
        result: CompletionLogprobs,
        positions: Iterable[PositionLogprobs | None],
        token_ids: Sequence[int],
        skipped: frozenset[int] = frozenset(),
    ) -> None:
        """Append the entries of `token_ids` to `result`; None where nothing is known, as of a prompt's first token.
        skipped: tokens that are not in the text."""
        texts = self._names.pieces(token_ids, skipped)
        for position, token_id, data in zip(positions, token_ids, texts, strict=True):
            result.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(data))
            result.tokens.append(self._names.key(token_id))
            result.token_logprobs.append(None if position is None else finite(position.logprobs[0]))
            result.top_logprobs.append(None if position is None else self._alternatives(position))

    def _alternatives(self, position: PositionLogprobs) -> dict[str, float]:
        """The best tokens, and the token itself wherever it stands."""
        found = {
            self._names.key(position.token_ids[i]): position.logprobs[i]
            for i in reversed([*alternatives(position, self._top)])
        }
        found.setdefault(self._names.key(position.token_ids[0]), finite(position.logprobs[0]))
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def prompt_logprobs(positions: Iterable[PositionLogprobs | None] | None, top: int) -> PromptLogprobs | None:
    """Token id → log-probability, rank and text, for each position of the prompt: its own token and the `top` best."""
    if positions is None:
        return None
    return [None if position is None else _prompt_position(position, top) for position in positions]


def _prompt_position(position: PositionLogprobs, top: int) -> dict[str, PromptLogprob]:
    texts = position.decoded_tokens
    return {
        str(position.token_ids[i]): PromptLogprob(
            finite(position.logprobs[i]), position.ranks[i], None if texts is None else texts[i]
        )
        for i in (0, *alternatives(position, top))
    }
