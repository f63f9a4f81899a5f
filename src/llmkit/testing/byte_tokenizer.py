"""A tokenizer without files: every byte is a token, and a few words are."""

from __future__ import annotations

from collections.abc import Sequence

WORDS = ("true", "false", "null", "yes", "no", "maybe", '{"', '":', '",', '"}', "  ", "10", "ab", "the", "é", "日本")
EOS = "<|end|>"


class ByteTokenizer:
    """Tokens 0..255 are bytes, then come `words`, then the end-of-sequence token. Longer words are preferred."""

    def __init__(self, words: Sequence[str] = WORDS) -> None:
        self._pieces = [bytes([value]) for value in range(256)] + [word.encode() for word in words]
        self._ids = {piece: token_id for token_id, piece in enumerate(self._pieces)}
        self._longest = max(map(len, self._pieces))

    @property
    def vocab_size(self) -> int:
        return len(self._pieces) + 1

    @property
    def bos_token_id(self) -> int | None:
        return None

    @property
    def eos_token_id(self) -> int:
        return len(self._pieces)

    @property
    def chat_template(self) -> str | None:
        return None

    @property
    def special_tokens(self) -> dict[str, str]:
        return {"eos_token": EOS}

    @property
    def special_token_ids(self) -> frozenset[int]:
        return frozenset({self.eos_token_id})

    @property
    def byte_level(self) -> bool:
        return True

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002 - it adds none
        data, token_ids = text.encode(), []
        while data:
            size = next(n for n in range(self._longest, 0, -1) if data[:n] in self._ids)
            token_ids.append(self._ids[data[:size]])
            data = data[size:]
        return token_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [t for t in token_ids if not (skip_special_tokens and t in self.special_token_ids)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return EOS.encode() if token_id == self.eos_token_id else self._pieces[token_id]

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")
