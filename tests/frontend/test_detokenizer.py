"""Incremental detokenization: no half characters, and the pieces join up to the whole."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from llmkit.frontend.detokenizer import build_detokenizer, decode_whole

FAMILY = "👨‍👩‍👧"


def pieces(tokenizer, token_ids, prompt=(), **kwargs):
    detokenizer = build_detokenizer(tokenizer, prompt, **kwargs)
    return [detokenizer.append(token_id) for token_id in token_ids]


def test_characters_of_several_tokens_come_whole(byte_tokenizer):
    """B02 a."""
    deltas = pieces(byte_tokenizer, FAMILY.encode())
    assert "".join(deltas) == FAMILY
    assert not any("\ufffd" in delta for delta in deltas)


def test_an_unfinished_character_is_left_out(byte_tokenizer):
    """B02 c, d."""
    assert "".join(pieces(byte_tokenizer, list("a🌶".encode())[:3])) == "a"


def test_bytes_that_are_no_character_are_replaced_once_that_is_certain(byte_tokenizer):
    assert "".join(pieces(byte_tokenizer, [0x8C, *b"ok"])) == "\ufffdok"


def test_a_character_begun_by_the_prompt_is_completed(byte_tokenizer):
    data = list("x🌶!".encode())
    assert "".join(pieces(byte_tokenizer, data[3:], prompt=data[:3])) == "🌶!"


def test_special_tokens(byte_tokenizer):
    assert "".join(pieces(byte_tokenizer, [97, 257, 98])) == "ab"
    assert "".join(pieces(byte_tokenizer, [97, 257, 98], skip_special_tokens=False)) == "a<eos>b"


@given(data=st.lists(st.integers(0, 257), max_size=40), skip=st.booleans())
@example(data=[0xED, 0xA0], skip=False)
@example(data=[0xED, 0xBF, 257], skip=True)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_byte_level_stream_is_the_whole_decoding(byte_tokenizer, data, skip):
    streamed = "".join(pieces(byte_tokenizer, data, skip_special_tokens=skip))
    whole = byte_tokenizer.decode(data, skip_special_tokens=skip)
    # Only bytes of a character that never became complete may be missing, at the end: one, or the first two of a
    # surrogate, whose third one Python's decoder waits for.
    assert whole.startswith(streamed)
    read = [token for token in data if not (skip and token in byte_tokenizer.special_token_ids)]
    surrogate = read[-2:-1] == [0xED] and 0xA0 <= read[-1] <= 0xBF
    assert whole.removeprefix(streamed) in ("", "\ufffd", "\ufffd\ufffd"[: 2 * surrogate])


def test_leading_spaces_are_kept_after_a_prompt(metaspace_tokenizer):
    """B04."""
    a, b_spaced, b = 1, 2, 3
    assert pieces(metaspace_tokenizer, [b_spaced, b, a], prompt=[a]) == [" b", "b", " a"]
    assert "".join(pieces(metaspace_tokenizer, [b_spaced, b, a])) == metaspace_tokenizer.decode([b_spaced, b, a])


def test_byte_fallback_characters_come_whole(metaspace_tokenizer):
    first_byte = 5
    deltas = pieces(metaspace_tokenizer, [1, *(first_byte + byte for byte in FAMILY.encode()), 2], prompt=[1])
    assert "".join(deltas) == f" a{FAMILY} b"
    assert not any("\ufffd" in delta for delta in deltas)


def test_endless_invalid_bytes_do_not_pile_up(metaspace_tokenizer):
    first_byte = 5
    text = "".join(pieces(metaspace_tokenizer, [first_byte + 0x8C] * 100 + [2], prompt=[1]))
    assert text == "\ufffd" * 100 + " b"


def test_without_tokenizer_there_is_no_text():
    assert pieces(None, [1, 2, 3]) == ["", "", ""]


def test_decode_whole_equals_a_stream(byte_tokenizer):
    ids = list("a🌶b".encode())
    assert decode_whole(byte_tokenizer, ids) == "a🌶b"


@pytest.mark.parametrize("skip", [True, False])
def test_windowed_special_tokens(metaspace_tokenizer, skip):
    text = "".join(pieces(metaspace_tokenizer, [2, 4, 4, 1], prompt=[1], skip_special_tokens=skip))
    assert text == (" b a" if skip else " b</s></s> a")
