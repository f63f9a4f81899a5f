from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from llmkit.errors import InvalidRequestError, ModelError
from llmkit.frontend.tokenizers_fast import FastTokenizer, byte_level_alphabet
from llmkit.frontend.tokenizers_hf import load_hf_tokenizer, set_bos_eos


def byte_level_backend(without: str = "", merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """A byte-level BPE with a token for each byte but those of `without`, and what `merges` make."""
    characters = [c for c, byte in byte_level_alphabet().items() if chr(byte) not in without]
    vocabulary = {token: i for i, token in enumerate([*characters, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return backend


def metaspace_backend() -> Tokenizer:
    """The tokenizer of case B04: a decoder that depends on context."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "▁a": 1, "▁b": 2, "b": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def byte_fallback_backend() -> Tokenizer:
    """As a SentencePiece model is converted: unknown characters as <0x..> tokens."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {token: i for i, token in enumerate(["<unk>", *bytes_, "▁", "a", "▁a"])}
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    return backend


def save(folder: Path, backend: Tokenizer, **settings: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_byte_level_tokens_are_bytes() -> None:
    tokenizer = FastTokenizer(byte_level_backend(merges=(("ð", "Ł"),)))
    ids = tokenizer.encode("🌶 é")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"\xf0\x9f", b"\x8c", b"\xb6", b" ", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "🌶 é"
    assert tokenizer.decode(ids[:2]) == "�"
    assert tokenizer.token_text(ids[0]) == "ðŁ"
    assert tokenizer.byte_level


def test_the_alphabet_has_every_byte_once() -> None:
    alphabet = byte_level_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["A"]) == (0x20, 0x0A, 0x41)


def test_bytes_without_token_are_dropped() -> None:
    tokenizer = FastTokenizer(byte_level_backend(without="\x04"))
    assert tokenizer.encode("\x04") == []
    assert tokenizer.decode(tokenizer.encode("\x04hi")) == "hi"


def test_byte_fallback_tokens_are_bytes() -> None:
    tokenizer = FastTokenizer(byte_fallback_backend())
    ids = tokenizer.encode("a\né")
    assert [tokenizer.token_bytes(i) for i in ids] == [b" a", b"\n", b"\xc3", b"\xa9"]
    assert tokenizer.decode(ids) == "a\né"
    assert not tokenizer.byte_level


def test_metaspace_tokens_keep_their_space() -> None:
    """B04: what the detokenizer builds on."""
    tokenizer = FastTokenizer(metaspace_backend())
    assert [tokenizer.token_bytes(i) for i in (1, 2, 3)] == [b" a", b" b", b"b"]
    assert tokenizer.decode([1, 2, 3, 1]) == "a bb a"
    assert not tokenizer.byte_level


def test_special_tokens_are_their_text() -> None:
    tokenizer = FastTokenizer(byte_level_backend(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.special_token_ids == {256, 257}
    assert tokenizer.token_bytes(257) == b"</s>"
    ids = tokenizer.encode("<s>A</s>")
    assert (ids[0], ids[-1]) == (256, 257)
    assert (tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)) == ("A", "<s>A</s>")
    assert tokenizer.vocab_size == 258


def test_a_token_becomes_special_because_the_settings_say_so() -> None:
    backend = byte_level_backend()
    backend.add_tokens(["<|turn|>"])
    assert FastTokenizer(backend).special_token_ids == {256, 257}
    tokenizer = FastTokenizer(backend, additional_special_tokens=["<|turn|>", "<|not in the vocabulary|>"])
    assert tokenizer.special_token_ids == {256, 257, 258}
    assert tokenizer.vocab_size == 259
    assert FastTokenizer(backend, special_tokens={"pad_token": "[PAD]"}).special_tokens == {"pad_token": "[PAD]"}


def test_ids_without_token() -> None:
    tokenizer = FastTokenizer(byte_level_backend())
    assert (tokenizer.token_bytes(9999), tokenizer.token_text(9999), tokenizer.decode([9999])) == (b"", "", "")


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="character 2 is half of a surrogate pair") as caught:
        FastTokenizer(byte_level_backend()).encode("ab\ud800")
    assert caught.value.param == "prompt"


def test_other_threads_run_while_a_long_text_is_tokenised() -> None:
    tokenizer = FastTokenizer(byte_level_backend())
    ids: list[int] = []
    thread = threading.Thread(target=lambda: ids.extend(tokenizer.encode("long text " * 50_000)))
    thread.start()
    turns = 0
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    assert ids == tokenizer.encode("long text ") * 50_000
    assert turns > 20  # with the lock of the interpreter held, one or two


def test_truncation_and_padding_of_the_file_are_switched_off() -> None:
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert len(FastTokenizer(backend).encode("four")) == 4


def test_begin_and_end_tokens_of_the_file(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer = load_hf_tokenizer(save(tmp_path, backend, bos_token="<s>"))
    assert tokenizer is not None
    assert tokenizer.encode("A")[0] == 256
    assert len(tokenizer.encode("A", add_special_tokens=False)) == 1


@pytest.mark.parametrize(
    ("settings", "front", "back"),
    [
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True}, [256], []),
        ({"add_bos_token": True, "add_eos_token": True}, [256], [257]),
        ({"add_eos_token": True}, [], [257]),
    ],
)
def test_settings_win_over_the_file(
    tmp_path: Path, settings: dict[str, bool], front: list[int], back: list[int]
) -> None:
    backend = byte_level_backend()
    set_bos_eos(backend, "<s>", None)
    tokenizer = load_hf_tokenizer(save(tmp_path, backend, bos_token="<s>", eos_token={"content": "</s>"}, **settings))
    assert tokenizer is not None
    middle = tokenizer.encode("A", add_special_tokens=False)
    assert tokenizer.encode("A") == [*front, *middle, *back]


def test_a_begin_token_that_the_vocabulary_lacks_is_not_added(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level_backend(), bos_token="<bos>", add_bos_token=True)
    tokenizer = load_hf_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.bos_token_id is None
    assert len(tokenizer.encode("A")) == 1


def test_chat_template_sources(tmp_path: Path) -> None:
    def template(**settings: Any) -> str | None:
        tokenizer = load_hf_tokenizer(save(tmp_path, byte_level_backend(), **settings))
        assert tokenizer is not None
        return tokenizer.chat_template

    assert template() is None
    assert template(chat_template="one") == "one"
    named = [{"name": "tool_use", "template": "two"}, {"name": "default", "template": "three"}]
    assert template(chat_template=named) == "three"
    (tmp_path / "chat_template.jinja").write_text("four")
    assert template(chat_template="one") == "four"


def test_roles_from_either_file(tmp_path: Path) -> None:
    save(tmp_path, byte_level_backend(), eos_token="</s>", extra_special_tokens={"image": "!"})
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "other"}')
    tokenizer = load_hf_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.special_token_ids == {256, 257, *tokenizer.encode("!")}


def test_a_tokenizer_file_by_itself(tmp_path: Path) -> None:
    tokenizer = load_hf_tokenizer(save(tmp_path, byte_level_backend(), eos_token="</s>") / "tokenizer.json")
    assert tokenizer is not None
    assert tokenizer.eos_token_id == 257


def test_no_tokenizer_and_a_broken_one(tmp_path: Path) -> None:
    assert load_hf_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer that can be read"):
        load_hf_tokenizer(tmp_path)


@pytest.mark.model
def test_smollm2_folder(smollm2_folder: Path, golden: list[dict[str, Any]]) -> None:
    """All golden prompts, and what the pieces of a character are (case B02)."""
    tokenizer = load_hf_tokenizer(smollm2_folder)
    assert tokenizer is not None
    for item in golden:
        assert tokenizer.encode(item["prompt"]) == item["prompt_token_ids"]
    assert tokenizer.encode("🌶") == [10813, 230, 131]
    assert [tokenizer.token_bytes(i) for i in (10813, 230, 131)] == [b"\xf0\x9f", b"\x8c", b"\xb6"]
    family = tokenizer.encode("👨‍👩‍👧")
    assert family == [10813, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117]
    assert b"".join(map(tokenizer.token_bytes, family)).decode() == "👨‍👩‍👧"
    assert tokenizer.encode("\u0004") == []
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert tokenizer.special_token_ids == set(range(17))
    assert tokenizer.byte_level


def test_a_folder_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    vocabulary = {token: i for i, token in enumerate([*byte_level_alphabet(), "ab", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "chat_template": "t"}')
    tokenizer = load_hf_tokenizer(tmp_path)
    assert tokenizer is not None
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("ab c")] == [b"ab", b" ", b"c"]
    assert tokenizer.special_tokens["eos_token"] == "<|endoftext|>"
    assert tokenizer.special_token_ids == {257}
    assert (tokenizer.byte_level, tokenizer.chat_template) == (True, "t")


def test_a_tokenizer_that_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json, and .*--tokenizer"):
        load_hf_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"additional_special_tokens": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": [], "template": 1}]}'),
        ("tokenizer_config.json", b'{"bos_token": "\\ud800"}'),
        ("chat_template.jinja", b"\xff\xfe"),
    ],
)
def test_damaged_files_beside_the_tokenizer(tmp_path, name, content):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    from llmkit.errors import ModelError
    from llmkit.frontend.tokenizers_hf import load_hf_tokenizer

    Backend(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=r"damaged|not valid JSON"):
        load_hf_tokenizer(tmp_path)
