from __future__ import annotations

import pickle

import pytest

from llmkit.frontend.token_vocabulary import TokenVocabulary

from .conftest import BOS, EOS, ByteTokenizer


class Gaps(ByteTokenizer):
    """Has no token for the bytes 4 and F1, but one for F1 81 together."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in (0x04, 0xF1) else super().token_bytes(token_id)


def test_tokens_that_are_no_text_have_no_bytes() -> None:
    tokenizer = ByteTokenizer(["ab"])
    vocabulary = TokenVocabulary.of(tokenizer, 300, {EOS, 46, 400})
    assert vocabulary.vocab_size == 300
    assert vocabulary.num_words == 10
    assert vocabulary.tokens[97] == b"a"
    assert vocabulary.tokens[258] == b"ab"
    # Special tokens, a text token that ends the model's answers, and ids beyond the tokenizer.
    assert {vocabulary.tokens[i] for i in (BOS, EOS, 46, 259, 299)} == {b""}
    assert vocabulary.eos_token_ids == {EOS, 46}
    assert vocabulary.special_token_ids == {BOS, EOS, 46}
    assert vocabulary.bos_token_id == BOS
    assert vocabulary.stop_token_id == 46


def test_logits_may_be_narrower_than_the_tokenizer() -> None:
    vocabulary = TokenVocabulary.of(ByteTokenizer(["ab"]), 200)
    assert len(vocabulary.tokens) == 200
    assert vocabulary.bos_token_id is None
    assert vocabulary.stop_token_id == 199  # no id is without text: the last one then


def test_it_travels_between_processes() -> None:
    vocabulary = TokenVocabulary.of(ByteTokenizer(), 258, {EOS})
    assert not vocabulary.missing_bytes
    copy = pickle.loads(pickle.dumps(vocabulary))
    assert copy.tokens == vocabulary.tokens
    assert copy.eos_token_ids == vocabulary.eos_token_ids


@pytest.mark.parametrize(
    ("text", "writable"),
    [
        ("", True),
        ("plain é 🌶", True),
        ("a\x04", False),
        ("\U00040000", False),  # F1 80 80 80
        ("\U00041000", True),  # F1 81 80 80, whose first two bytes are one token
        ("a\U00041000\x04", False),
        ("\ud83d", False),
    ],
)
def test_text_that_the_vocabulary_cannot_write(text: str, writable: bool) -> None:
    vocabulary = TokenVocabulary.of(Gaps([b"\xf1\x81"]), 259)
    assert vocabulary.can_write(text) is writable
