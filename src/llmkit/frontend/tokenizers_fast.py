"""A tokenizer on top of the `tokenizers` library, whatever file it was built from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken

from llmkit.errors import InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_LONG_TEXT_CHARS = 8192
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class FastTokenizer:
    """Implements `llmkit.frontend.tokenizer.Tokenizer`. Thread-safe: nothing changes after construction.

    backend: the `tokenizers.Tokenizer`; truncation and padding are switched off.
    special_tokens: role ("bos_token", "eos_token", …) → text. Texts that the vocabulary has become special tokens,
    the others are kept for chat templates only: an id the model has no embedding for is never made.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: dict[str, str] | None = None,
        additional_special_tokens: Sequence[str] = (),
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = chat_template
        _make_special(backend, [*self._special_tokens.values(), *additional_special_tokens])
        added = backend.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        steps = _decoder_steps(backend)
        self._byte_level = [step["type"] for step in steps] == ["ByteLevel"]
        self._piece_bytes = _piece_decoder(steps)

    @property
    def backend(self) -> Backend:
        """The `tokenizers.Tokenizer` underneath, for grammar engines that take one. Not to be changed."""
        return self._backend

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id; ids below it may be unused."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    @property
    def special_tokens(self) -> dict[str, str]:
        return dict(self._special_tokens)

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def byte_level(self) -> bool:
        return self._byte_level

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Characters that the vocabulary has no token for are dropped where the tokenizer has
        no unknown token, so the list may be empty. Raises InvalidRequestError for text that is not Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"The text is not valid Unicode: character {error.start} is half of a surrogate pair.", param="prompt"
            ) from error
        if len(text) < _LONG_TEXT_CHARS:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return ids
        # Unlike `encode`, this lets other threads of Python run meanwhile.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        long_ids: list[int] = encoding.ids
        return long_ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no whole character become U+FFFD, unknown ids become nothing."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token in the middle of a text (a leading space is kept); b"" for an id without token."""
        if (text := self._added.get(token_id)) is not None:
            return text.encode()
        piece = self._backend.id_to_token(token_id)
        return b"" if piece is None else self._piece_bytes(piece)

    def token_text(self, token_id: int) -> str:
        """The token as it stands in the vocabulary; "" for an id without token."""
        return self._backend.id_to_token(token_id) or ""

    def _id_of(self, role: str) -> int | None:
        text = self._special_tokens.get(role)
        token_id: int | None = None if text is None else self._backend.token_to_id(text)
        return token_id


def _make_special(backend: Backend, texts: list[str]) -> None:
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in dict.fromkeys(texts) if text not in special and backend.token_to_id(text) is not None]
    if missing:
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])


def byte_level_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE vocabularies: printable Latin-1 stands for itself, the other bytes, in
    order, for the characters from U+0100 on (the scheme of GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _piece_decoder(steps: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """How a vocabulary entry becomes bytes, read off the steps of the tokenizer's decoder."""
    if any(step["type"] == "ByteLevel" for step in steps):
        alphabet = byte_level_alphabet()

        def byte_level(piece: str) -> bytes:
            if all(character in alphabet for character in piece):
                return bytes([alphabet[character] for character in piece])
            return piece.encode()

        return byte_level

    space = next((mark for step in steps if (mark := _space_mark(step))), None)
    has_byte_fallback = any(step["type"] == "ByteFallback" for step in steps)

    def plain(piece: str) -> bytes:
        if has_byte_fallback and (match := _BYTE_FALLBACK.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return (piece.replace(space, " ") if space else piece).encode()

    return plain


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _space_mark(step: dict[str, Any]) -> str | None:
    """The character that stands for a space in the vocabulary, if this decoder step turns one into a space."""
    if step["type"] == "Metaspace":
        return str(step["replacement"])
    if step["type"] == "Replace" and step["content"] == " " and "String" in step["pattern"]:
        return str(step["pattern"]["String"])
    return None
