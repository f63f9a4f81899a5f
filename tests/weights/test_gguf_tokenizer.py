from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmkit.errors import ModelError
from llmkit.frontend.tokenizers_fast import FastTokenizer, byte_level_alphabet
from llmkit_weights.gguf_format import GgufFormat
from llmkit_weights.gguf_tokenizer import PRE_TOKENIZERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ALPHABET = list(byte_level_alphabet())


@pytest.fixture
def build(write_gguf: Callable[..., Path], tensors: dict[str, Any]) -> Callable[..., FastTokenizer]:
    """build(metadata) → the tokenizer of a tiny file with those keys."""

    def run(metadata: Callable[[Any], None], architecture: str = "llama") -> FastTokenizer:
        tokenizer = GgufFormat().tokenizer(write_gguf(tensors, metadata=metadata, architecture=architecture))
        assert isinstance(tokenizer, FastTokenizer)
        return tokenizer

    return run


def byte_level(
    pre: str | None,
    merges: tuple[str, ...] = ("a b",),
    extra: tuple[tuple[str, int], ...] = (),
    more: Callable[[Any], None] | None = None,
) -> Callable[[Any], None]:
    """Keys of a byte-level tokenizer: all bytes, what `merges` make, and `extra` (text, type)."""

    def metadata(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        made = [merge.replace(" ", "") for merge in merges]
        writer.add_token_list([*ALPHABET, *made, *(text for text, _ in extra)])
        writer.add_token_types([NORMAL] * (256 + len(made)) + [kind for _, kind in extra])
        writer.add_token_merges(list(merges))
        if more is not None:
            more(writer)

    return metadata


# They make longer tokens where the pre-tokenizer does not cut between the parts.
MERGES = ("1 2", "12 3", "123 4", "Ġ 12", "Ġ a", "! Ċ", "Ċ Ċ", "' S")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "1234 12", ["1234", " 12"]),
        ("default", "1234 12", ["1234", " 12"]),
        ("smollm", "1234 12", ["1", "2", "3", "4", " ", "1", "2"]),
        ("qwen2", "1234 12", ["1", "2", "3", "4", " ", "1", "2"]),
        ("llama-bpe", "1234 12", ["123", "4", " ", "12"]),
        ("gpt-2", "!\n\n", ["!", "\n\n"]),
        ("qwen2", "!\n\n", ["!\n", "\n"]),
        ("llama-bpe", "x'S", ["x", "'S"]),
        ("gpt-2", "x'S", ["x", "'", "S"]),
        ("smollm", " ab", [" a", "b"]),
    ],
)
def test_pre_tokenizers_cut_where_the_models_do(
    build: Callable[..., FastTokenizer], pre: str, text: str, pieces: list[str]
) -> None:
    tokenizer = build(byte_level(pre, MERGES))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [tokenizer.token_bytes(i).decode() for i in ids] == pieces
    assert tokenizer.decode(ids) == text


def test_every_name_gives_a_tokenizer(build: Callable[..., FastTokenizer]) -> None:
    for pre in PRE_TOKENIZERS:
        assert build(byte_level(pre)).byte_level


@pytest.mark.parametrize("pre", ["tekken", "no such thing"])
def test_unknown_pre_tokenizers_are_errors(build: Callable[..., FastTokenizer], pre: str) -> None:
    with pytest.raises(ModelError, match=rf"the pre-tokenizer '{pre}'.*known: default, gpt-2, smollm.*--tokenizer"):
        build(byte_level(pre))


def test_a_missing_pre_tokenizer(build: Callable[..., FastTokenizer]) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.ggml\.pre"):
        build(byte_level(None))
    assert len(build(byte_level(None), architecture="qwen2").encode("12")) == 2


def test_qwen2_composes_characters(build: Callable[..., FastTokenizer]) -> None:
    assert build(byte_level("qwen2")).encode("e\u0301") == build(byte_level("smollm")).encode("\u00e9")


def test_special_and_added_tokens(build: Callable[..., FastTokenizer]) -> None:
    def more(writer: Any) -> None:
        writer.add_bos_token_id(257)
        writer.add_eos_token_id(258)
        writer.add_add_bos_token(True)
        writer.add_chat_template("template")

    extra = (("<s>", CONTROL), ("</s>", CONTROL), ("<tool>", USER_DEFINED))
    tokenizer = build(byte_level("smollm", extra=extra, more=more))
    assert tokenizer.encode("<tool>") == [257, 259]
    assert tokenizer.special_token_ids == {257, 258}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (257, 258)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.decode([257, 259, 258]) == "<tool>"
    assert tokenizer.chat_template == "template"


@pytest.mark.parametrize(("pre", "added"), [("smollm", False), ("llama-bpe", True)])
def test_begin_token_where_the_file_does_not_say(build: Callable[..., FastTokenizer], pre: str, added: bool) -> None:
    tokenizer = build(byte_level(pre, extra=(("<s>", CONTROL),), more=lambda writer: writer.add_bos_token_id(257)))
    assert (tokenizer.encode("a")[0] == 257) is added


def test_no_tokenizer(write_gguf: Callable[..., Path], tensors: dict[str, Any]) -> None:
    assert GgufFormat().tokenizer(write_gguf(tensors)) is None


def test_unknown_kind_and_damaged_tokenizers(build: Callable[..., FastTokenizer]) -> None:
    def other_kind(writer: Any) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list(["a"])

    def few_types(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        writer.add_token_types([NORMAL])

    def no_scores(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["a", "b"])

    def missing_token(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(["a", "b"])
        writer.add_token_merges(["a b"])

    for metadata, message in (
        (other_kind, r"type 'bert', which cannot be rebuilt.*--tokenizer"),
        (few_types, "has 2 tokens but 1 token types"),
        (no_scores, "no score for each token"),
        (byte_level("smollm", extra=(("A", NORMAL),)), "equal texts"),
        (missing_token, "the merge 'a b', which is not of two tokens"),
        (byte_level("smollm", more=lambda writer: writer.add_eos_token_id(999)), "eos_token is token 999, but has 257"),
    ):
        with pytest.raises(ModelError, match=message):
            build(metadata)


def sentencepiece(space_prefix: bool | None = None) -> Callable[[Any], None]:
    def metadata(writer: Any) -> None:
        pieces = {"▁": -9.0, "a": -10.0, "b": -11.0, "▁a": -1.0, "ab": -2.0, "▁ab": -3.0, "abb": -0.5}
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *bytes_, *pieces])
        writer.add_token_types([UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces))
        writer.add_token_scores([0.0] * 259 + list(pieces.values()))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        if space_prefix is not None:
            writer.add_add_space_prefix(space_prefix)

    return metadata


def test_sentencepiece_joins_the_best_scored_pair_first(build: Callable[..., FastTokenizer]) -> None:
    tokenizer = build(sentencepiece())
    # "▁a" (-1) is joined before "ab" (-2), then "▁ab" from "▁a" and "b"; "abb" (-0.5) needs "ab" first.
    assert [tokenizer.token_text(i) for i in tokenizer.encode("ab abb")] == ["<s>", "▁ab", "▁ab", "b"]
    assert tokenizer.decode(tokenizer.encode("ab abb")) == "ab abb"
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("\né")] == [b"<s>", b" ", b"\n", b"\xc3", b"\xa9"]
    assert tokenizer.special_token_ids == {0, 1, 2}


def test_sentencepiece_without_space_prefix(build: Callable[..., FastTokenizer]) -> None:
    tokenizer = build(sentencepiece(space_prefix=False))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("abb")] == ["<s>", "abb"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


@pytest.mark.model
def test_smollm2_prompts(smollm2_gguf: Path, golden: list[dict[str, Any]]) -> None:
    tokenizer = GgufFormat().tokenizer(smollm2_gguf)
    assert tokenizer is not None
    for item in golden:
        assert tokenizer.encode(item["prompt"]) == item["prompt_token_ids"]
        assert tokenizer.decode(item["output_token_ids"]) == item["text"]
    # Digits are split off one by one, which the byte-level rule alone would not do.
    assert tokenizer.encode("x   42") == [104, 333, 36, 34]
    assert tokenizer.special_token_ids == set(range(17))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.byte_level) == (1, 2, True)
