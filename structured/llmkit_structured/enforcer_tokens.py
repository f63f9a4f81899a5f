"""A vocabulary as a tree of bytes, and masks of the tokens that stay within a JSON string."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from llmkit.frontend.token_vocabulary import TokenVocabulary

Mask = np.ndarray[Any, np.dtype[np.int32]]
_BLANKS = b" \t\n\r"


@dataclass
class Node:
    """Tokens whose bytes lead here, and where further bytes lead."""

    tokens: list[int] = field(default_factory=list)
    children: dict[int, Node] = field(default_factory=dict)


def utf8_length(first: int) -> int:
    """Bytes of the character that begins with byte `first`; 0 if none does."""
    if first < 0x80:
        return 1
    if 0xC2 <= first < 0xE0:
        return 2
    if 0xE0 <= first < 0xF0:
        return 3
    return 4 if 0xF0 <= first < 0xF5 else 0


def is_beginning(data: bytes) -> bool:
    """Whether `data` are the first bytes of some character, and not all of them."""
    length = utf8_length(data[0])
    if not 0 < len(data) < length:
        return False
    # Overlong forms, surrogates and what is beyond Unicode show in the second byte.
    ranges = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}
    low, high = ranges.get(data[0], (0x80, 0xBF))
    return (len(data) < 2 or low <= data[1] <= high) and all(0x80 <= byte <= 0xBF for byte in data[2:])


class TokenTree:
    """All tokens of a vocabulary.

    Within a JSON string most tokens are allowed, so they are not walked through one by one. Those of plain characters
    only, and those that end with the closing quote, are sorted by their length beforehand; those that begin with a
    quote or backslash, or with a part of a character, are walked through; the few others, which have a quote or
    backslash in the middle, are not used within strings.
    """

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self.num_words = vocabulary.num_words
        self.tokens = vocabulary.tokens
        self.root = Node()
        self._plain: dict[int, list[int]] = {}
        self._closing: dict[int, list[int]] = {}
        self._blank_first: set[int] = set()
        self.crossing: set[int] = set()
        for token_id, token in enumerate(vocabulary.tokens):
            if token:
                self._insert(token_id, token)
                self._sort(token_id, token)
        self._masks: dict[tuple[int, int, bool], Mask] = {}

    def _insert(self, token_id: int, token: bytes) -> None:
        node = self.root
        for byte in token:
            node = node.children.setdefault(byte, Node())
        node.tokens.append(token_id)

    def _sort(self, token_id: int, token: bytes) -> None:
        if token[0] in b'"\\' or 0x80 <= token[0] < 0xC0:
            return
        body = token[:-1] if token.endswith(b'"') else token
        length = plain_length(body)
        if length is None:
            if utf8_length(token[0]):
                self.crossing.add(token_id)
            return
        by_length = self._plain if body is token else self._closing
        if body is not token and length != len(body.decode(errors="ignore")):
            self.crossing.add(token_id)  # the quote stands in the middle of a character
            return
        by_length.setdefault(length, []).append(token_id)
        if token[0] in _BLANKS:
            self._blank_first.add(token_id)

    def in_string(self, least: int, most: int | None, blank_first: bool) -> Mask:
        """The sorted tokens that are allowed in a string which needs `least` more characters before its quote and may
        have `most` more (None: any number). blank_first: whether the first may be a blank. Not to be changed."""
        longest = max([0, *self._plain, *self._closing])
        key = min(least, longest + 1), longest if most is None else min(most, longest), blank_first
        if key not in self._masks:
            mask = self.empty()
            for length, ids in self._plain.items():
                if length <= key[1]:
                    self.allow(mask, ids if blank_first else [i for i in ids if i not in self._blank_first])
            for length, ids in self._closing.items():
                if key[0] <= length <= key[1]:
                    self.allow(mask, ids if blank_first else [i for i in ids if i not in self._blank_first])
            self._masks[key] = mask
        return self._masks[key]

    def is_sorted(self, token_id: int) -> bool:
        """Whether `in_string` decides about the token within strings; else it is walked through, or `crossing`."""
        token = self.tokens[token_id]
        return not (token[0] in b'"\\' or 0x80 <= token[0] < 0xC0) and token_id not in self.crossing

    def empty(self) -> Mask:
        """A row without any token."""
        return np.zeros(self.num_words, dtype=np.int32)

    @staticmethod
    def allow(mask: Mask, ids: list[int]) -> None:
        """Set the bits of `ids`."""
        if ids:
            where = np.asarray(ids)
            np.bitwise_or.at(mask.view(np.uint32), where >> 5, np.uint32(1) << (where & 31).astype(np.uint32))


def plain_length(data: bytes) -> int | None:
    """Characters of `data` if all of them may stand in a JSON string as they are; the last may be incomplete and
    counts as one. None otherwise."""
    length, at = 0, 0
    while at < len(data):
        size = utf8_length(data[at])
        piece = data[at : at + size]
        if not size or data[at] < 0x20 or piece in (b'"', b"\\"):
            return None
        if len(piece) < size:
            return length + 1 if is_beginning(piece) else None
        try:
            piece.decode()
        except UnicodeDecodeError:
            return None
        length += 1
        at += size
    return length
