"""What a grammar engine has to know of a tokenizer: the bytes of every token, and which tokens are no text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmkit.frontend.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class TokenVocabulary:
    """Can be sent to other processes. Sizes in tokens.

    tokens: the bytes that each id adds to a text, for every id below vocab_size; b"" for special tokens, stop tokens of
    the model and unused ids, none of which a grammar may allow. Pieces of characters are bytes like any other.
    special_token_ids: ids that are no text, the model's end-of-sequence ids included. eos_token_ids: those that end an
    answer by themselves. vocab_size: width of the logits, which may be larger or smaller than the tokenizer's.
    bos_token_id: None if there is none.
    """

    tokens: tuple[bytes, ...]
    special_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    bos_token_id: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int] = ()) -> TokenVocabulary:
        """Of the model's tokenizer and the width of its logits. eos_token_ids: the model's, from all its files."""
        eos = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        special = eos | frozenset(token_id for token_id in tokenizer.special_token_ids if token_id < vocab_size)
        known = min(vocab_size, tokenizer.vocab_size)
        tokens = [b"" if i in special else tokenizer.token_bytes(i) for i in range(known)]
        tokens += [b""] * (vocab_size - known)
        bos = tokenizer.bos_token_id
        return cls(tuple(tokens), special, eos, bos if bos is not None and bos < vocab_size else None)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return len(self.tokens)

    @property
    def num_words(self) -> int:
        """Words int32 of a bitmask row."""
        return -(-len(self.tokens) // 32)

    @property
    def stop_token_id(self) -> int:
        """One id for libraries that insist on a stop token: an end-of-sequence id, else one without text, else the
        last id. What a grammar says of stop tokens does not matter: they are the core's."""
        if self.eos_token_ids:
            return min(self.eos_token_ids)
        return next((i for i, token in enumerate(self.tokens) if not token), len(self.tokens) - 1)

    @cached_property
    def missing_bytes(self) -> frozenset[int]:
        """Bytes that no token stands for alone. Text without any of them can be written whatever else it holds."""
        single = {token[0] for token in self.tokens if len(token) == 1}
        return frozenset(range(256)) - single

    def can_write(self, text: str) -> bool:
        """Whether some sequence of tokens has exactly the bytes of `text`. False for text that is not Unicode."""
        try:
            data = text.encode()
        except UnicodeEncodeError:
            return False
        if self.missing_bytes.isdisjoint(data):
            return True
        reached = [True] + [False] * len(data)
        for start in range(len(data)):
            if reached[start]:
                for length in range(1, min(self._longest, len(data) - start) + 1):
                    if data[start : start + length] in self._by_bytes:
                        reached[start + length] = True
        return reached[-1]

    @cached_property
    def _by_bytes(self) -> frozenset[bytes]:
        return frozenset(token for token in self.tokens if token)

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes), default=0)
