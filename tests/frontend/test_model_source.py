from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from llmkit.config import EngineConfig
from llmkit.config.sections import ModelConfig
from llmkit.errors import ConfigError, ModelError, PluginError
from llmkit.frontend.model_source import ModelSource, load_tokenizer, resolve_model
from llmkit.registry import Registry

CONFIG: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 4}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def registry() -> Registry:
    return Registry.discover()


def make_folder(folder: Path, config: dict[str, Any] = CONFIG, weights: str | None = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights is not None:
        save_file({"a": torch.zeros(1)}, folder / weights)
    return folder


def add_tokenizer(folder: Path, token: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    Tokenizer(models.WordLevel({token: 0}, unk_token=token)).save(str(folder / "tokenizer.json"))
    return folder


def resolve(registry: Registry, model: str, **settings: Any) -> ModelSource:
    return resolve_model(EngineConfig(model=ModelConfig(model=model, **settings)), registry)


def test_a_folder(tmp_path: Path, registry: Registry) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    source = resolve(registry, str(folder), overrides={"hidden_size": 6})
    assert (source.path, source.format_name, source.architecture) == (folder, "safetensors", "LlamaForCausalLM")
    assert source.config == CONFIG | {"hidden_size": 6}
    assert source.generation_config == {"temperature": 0.5}
    assert resolve(registry, str(folder), generation_config=False).generation_config == {}


def test_a_gguf_file_a_folder_with_one_and_a_name(registry: Registry, empty_cache: Path) -> None:
    import gguf

    file = empty_cache / "tiny" / "x.gguf"
    file.parent.mkdir(parents=True)
    writer = gguf.GGUFWriter(file, "llama")
    for add in ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{add}")(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", torch.zeros(8, 4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for model in (str(file), str(file.parent), "tiny"):
        source = resolve(registry, model)
        assert (source.format_name, source.architecture) == ("gguf", "LlamaForCausalLM")
        assert source.config["vocab_size"] == 8
    # Such folders often keep the config.json of the model they were made from.
    (file.parent / "config.json").write_text('{"model_type": "llama"}')
    assert resolve(registry, str(file.parent)).format_name == "gguf"


def test_dummy_weights_with_and_without_a_folder(tmp_path: Path, registry: Registry) -> None:
    folder = make_folder(tmp_path / "m", weights=None)
    assert resolve(registry, str(folder), load_format="dummy").config == CONFIG
    source = resolve(registry, "", load_format="dummy", overrides=CONFIG)
    assert (source.path, source.format_name, source.config) == (Path(), "dummy", CONFIG)
    assert load_tokenizer(source, EngineConfig()) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "No model is given"),
        ({"load_format": "gguf"}, "load_format gguf reads files"),
        ({"load_format": "dummy"}, r"model\.overrides does not describe one"),
        ({"load_format": "dummy", "overrides": {"hidden_size": 4}}, "does not say what architecture"),
        ({"load_format": "dummy", "overrides": {"architectures": "x"}}, "must be a list of names"),
    ],
)
def test_no_model(registry: Registry, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=message):
        resolve(registry, "", **settings)


def test_unknown_architecture(tmp_path: Path, registry: Registry) -> None:
    folder = make_folder(tmp_path / "m", CONFIG | {"architectures": ["OddForCausalLM"]})
    with pytest.raises(ModelError, match=r"architecture OddForCausalLM of .*Known architectures: .*LlamaForCausalLM"):
        resolve(registry, str(folder))
    assert resolve(registry, str(folder), overrides={"architectures": ["LlamaForCausalLM"]})


def test_code_that_comes_with_a_model_is_not_run(tmp_path: Path, registry: Registry) -> None:
    own_code = {"auto_map": {"AutoModelForCausalLM": "modeling.Odd"}}
    folder = make_folder(tmp_path / "m", CONFIG | own_code | {"architectures": ["OddForCausalLM"]})
    (folder / "modeling.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(ModelError, match=r"\(auto_map\) is never run"):
        resolve(registry, str(folder))
    known = make_folder(tmp_path / "known", CONFIG | own_code)
    assert resolve(registry, str(known)).architecture == "LlamaForCausalLM"


def test_only_pickles(tmp_path: Path, registry: Registry) -> None:
    folder = make_folder(tmp_path / "m", weights=None)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    for model in (folder, folder / "pytorch_model.bin"):
        with pytest.raises(ModelError, match=r"pickle files \(pytorch_model\.bin\), which are never opened"):
            resolve(registry, str(model))


def test_files_in_no_format(tmp_path: Path, registry: Registry) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"holds no model that can be read; in it: nothing\. A model is a folder"):
        resolve(registry, str(folder))
    (folder / "notes.txt").write_text("x")
    with pytest.raises(ModelError, match=r"in it: notes\.txt"):
        resolve(registry, str(folder))
    with pytest.raises(ModelError, match=r"notes\.txt is in no model format"):
        resolve(registry, str(folder / "notes.txt"))


def test_a_format_that_was_named_but_does_not_fit(tmp_path: Path, registry: Registry) -> None:
    folder = make_folder(tmp_path / "m")
    with pytest.raises(PluginError, match="is not in this format"):
        resolve(registry, str(folder), load_format="gguf")


def test_missing_path_names_what_is_near(tmp_path: Path, registry: Registry) -> None:
    """B82: one readable sentence."""
    make_folder(tmp_path / "llama-small")
    with pytest.raises(ModelError, match=r"lama-small does not exist; did you mean llama-small\?"):
        resolve(registry, str(tmp_path / "lama-small"))
    with pytest.raises(ModelError, match=r"zzz\.gguf does not exist; .* has llama-small\."):
        resolve(registry, str(tmp_path / "zzz.gguf"))
    with pytest.raises(ModelError, match=r"does not exist, nor does .*no-folder"):
        resolve(registry, str(tmp_path / "no-folder" / "model"))
    with pytest.raises(ModelError, match="Nothing is fetched from model hubs"):
        resolve(registry, "Organisation/Model-7B")


def test_unknown_names(registry: Registry) -> None:
    with pytest.raises(ModelError, match=r"did you mean smollm2-135m-instruct\?"):
        resolve(registry, "smollm2-instruct")
    with pytest.raises(ModelError, match="known names: smollm2-135m-instruct"):
        resolve(registry, "zzz")
    with pytest.raises(ModelError, match="Fetch it with: llmkit models pull smollm2-135m-instruct"):
        resolve(registry, "smollm2-135m-instruct")


def test_which_tokenizer(tmp_path: Path, registry: Registry) -> None:
    folder = add_tokenizer(make_folder(tmp_path / "m"), "own")
    other = add_tokenizer(tmp_path / "other", "other")
    source = resolve(registry, str(folder))

    def token(**settings: Any) -> str | None:
        config = EngineConfig(model=ModelConfig(model=str(folder), **settings))
        tokenizer = load_tokenizer(source, config, registry)
        return None if tokenizer is None else tokenizer.token_text(0)

    assert token() == "own"
    assert token(skip_tokenizer=True) is None
    assert token(tokenizer=str(other)) == "other"
    assert token(tokenizer=str(other / "tokenizer.json")) == "other"
    empty = make_folder(tmp_path / "empty")
    with pytest.raises(ModelError, match="given as the tokenizer, has no tokenizer in it"):
        token(tokenizer=str(empty))
    with pytest.raises(ModelError, match="does not exist"):
        token(tokenizer=str(tmp_path / "nothing"))


@pytest.mark.model
def test_tokenizer_of_a_gguf_for_another_model(smollm2_gguf: Path, tmp_path: Path, registry: Registry) -> None:
    source = resolve(registry, str(make_folder(tmp_path / "m")))
    config = EngineConfig(model=ModelConfig(model="m", tokenizer=str(smollm2_gguf)))
    tokenizer = load_tokenizer(source, config, registry)
    assert tokenizer is not None
    assert tokenizer.encode("Hello world") == [19556, 905]


class TestPathsThatAreNoModels:
    """Whatever the operating system says of a path, the answer is a ModelError that names it."""

    def resolve(self, name: str, registry: Registry) -> None:
        resolve_model(EngineConfig(model=ModelConfig(model=name)), registry)

    @pytest.mark.parametrize("name", ["/dev/null", "a" * 5000, "~nobody-here/model", "zero\0byte", "loop"])
    def test_odd_names(self, name: str, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("loop").symlink_to("loop")
        with pytest.raises(ModelError):
            self.resolve(name, registry)

    def test_a_pipe_is_not_waited_for(self, registry: Registry, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.gguf")
        with pytest.raises(ModelError, match="neither a folder nor a file"):
            self.resolve(str(tmp_path / "pipe.gguf"), registry)

    def test_a_folder_that_may_not_be_read(
        self, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "closed").mkdir()

        def refused(_: Path) -> Iterator[Path]:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "iterdir", refused)
        with pytest.raises(ModelError, match=r"closed.* cannot be read: Permission denied"):
            self.resolve(str(tmp_path / "closed"), registry)

    def test_a_cache_that_may_not_be_read(
        self, registry: Registry, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        empty_cache.mkdir(parents=True)

        def refused(_: Path) -> Iterator[Path]:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "iterdir", refused)
        with pytest.raises(ModelError, match="LLMKIT_CACHE"):
            self.resolve("some-name", registry)
