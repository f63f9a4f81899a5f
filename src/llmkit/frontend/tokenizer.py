"""What the engine needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text ↔ token ids. Thread-safe; holds no state per request."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, special and added tokens included."""
        ...

    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def chat_template(self) -> str | None:
        """Jinja source, if the model comes with one."""
        ...

    @property
    def special_tokens(self) -> dict[str, str]:
        """Variables for the chat template: bos_token, eos_token, … as text."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids left out when decoding with skip_special_tokens."""
        ...

    @property
    def byte_level(self) -> bool:
        """Whether decoding is nothing but joining the `token_bytes` and reading them as UTF-8. Text can then be
        decoded token by token; otherwise (Metaspace, WordPiece …) what a token reads as depends on its neighbours."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for (a piece of a character, possibly); special tokens as their text."""
        ...

    def token_text(self, token_id: int) -> str:
        """The token as it stands in the vocabulary."""
        ...
