"""Token ids to text, as they come.

Text is only ever handed out when later tokens cannot change it: the joined pieces equal the decoding of the whole
answer, however the tokens arrived, and no piece ends in half a character. A character whose bytes never become
complete is left out of the answer, streamed or not.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence

from llmkit.frontend.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_CHARACTER_BYTES = 4
# Tokens of the prompt that the first token of the answer is decoded with: as many as may hold one character.
_CONTEXT_TOKENS = 6
# Bytes are one token each at worst, so what is still undecided after this many tokens will never be decided.
_MAX_PENDING_TOKENS = 8


class Detokenizer(ABC):
    """Decodes the answer of one sequence."""

    @abstractmethod
    def append(self, token_id: int) -> str:
        """The text that `token_id` made certain; often empty, never ends in half a character. O(1) amortised."""


class NoDetokenizer(Detokenizer):
    """For models without tokenizer and requests with `detokenize=False`: the text stays empty."""

    def append(self, token_id: int) -> str:
        del token_id
        return ""


class ByteLevelDetokenizer(Detokenizer):
    """For byte-level tokenizers: the tokens' bytes through an incremental UTF-8 decoder.

    A character that the prompt began is completed by the answer, and then belongs to the answer.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(self._end_of_prompt(prompt_token_ids))

    def _end_of_prompt(self, prompt_token_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skipped:
                tail = self._token_bytes(token_id) + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        return tail

    def append(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))


class WindowedDetokenizer(Detokenizer):
    """For tokenizers whose tokens read differently in context: decodes a short window with and without the newest
    tokens, and hands out the difference once it ends in a whole character.

    The window starts at the tokens that produced the previous piece, or at the end of the prompt, so that a token
    keeps the leading space that it has there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_token_ids
        self._skip = skip_special_tokens
        self._join_specials = not (skip_special_tokens or spaces_between_special_tokens)
        self._last_was_special = False
        self._context = self._end_of_prompt(prompt_token_ids)
        self._pending: list[int] = []

    def _end_of_prompt(self, prompt_token_ids: Sequence[int]) -> list[int]:
        context: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if not (self._skip and token_id in self._special):
                context.append(token_id)
            if len(context) == _CONTEXT_TOKENS:
                break
        return context[::-1]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)

    def append(self, token_id: int) -> str:
        is_special = token_id in self._special
        if is_special and self._skip:
            return ""
        if is_special and self._join_specials and self._last_was_special and not self._pending:
            self._context = [token_id]
            return self._tokenizer.token_text(token_id)
        self._last_was_special = is_special
        self._pending.append(token_id)
        return self._take_pending()

    def _take_pending(self) -> str:
        known = self._decode(self._context)
        whole = self._decode(self._context + self._pending)
        if whole.startswith(known):
            text = whole[len(known) :]
        else:
            # The new tokens changed how the context reads (it held half a character): they stand for themselves.
            text = self._decode(self._pending)
        undecided = text == "" or text.endswith(REPLACEMENT)
        if undecided and len(self._pending) < _MAX_PENDING_TOKENS:
            return ""
        self._context, self._pending = self._pending, []
        return text


def build_detokenizer(
    tokenizer: Tokenizer | None,
    prompt_token_ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> Detokenizer:
    """The detokenizer that fits `tokenizer`, ready for the first token after `prompt_token_ids`."""
    if tokenizer is None:
        return NoDetokenizer()
    if tokenizer.byte_level:
        return ByteLevelDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens)
    return WindowedDetokenizer(tokenizer, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)


def decode_whole(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    *,
    prompt_token_ids: Sequence[int] = (),
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> str:
    """The text of a complete answer: what a stream of the same tokens joins up to."""
    detokenizer = build_detokenizer(
        tokenizer,
        prompt_token_ids,
        skip_special_tokens=skip_special_tokens,
        spaces_between_special_tokens=spaces_between_special_tokens,
    )
    return "".join(detokenizer.append(token_id) for token_id in token_ids)
