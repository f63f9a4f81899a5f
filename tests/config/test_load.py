"""Layers, sources and messages; cases B80 and B82 as far as they are configuration."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llmkit.config import LoadedConfig, SchedulerConfig, load_config
from llmkit.errors import ConfigError


def load(**arguments: Any) -> LoadedConfig:
    return load_config(**{"env": {}, **arguments})


BOMB = 'a: &a ["lol"]\n' + "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 9)}]\n" for below, name in pairwise("abcdefghi")
)
MERGE_BOMB = "a: &a {x: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{below}'] * 9)}]}}\n" for below, name in pairwise("abcdefghi")
)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "a.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def test_defaults() -> None:
    loaded = load()
    assert loaded.config.scheduler.policy == "auto"
    assert set(loaded.sources.values()) == {"default"}
    assert {s.key: s.value for s in loaded.settings()}["kv_cache.gpu_memory_utilization"] == 0.92


def test_flags_win_over_environment_over_file_over_defaults(write: Any) -> None:
    file = write("max-num-seqs: 1\nseed: 1\ndtype: float16\n")
    env = {"LLMKIT_MAX_NUM_SEQS": "2", "LLMKIT_MODEL__SEED": "2"}
    loaded = load(flags={"max_num_seqs": 3}, env=env, file=file)
    config = loaded.config
    assert (config.scheduler.max_num_seqs, config.model.seed, config.model.dtype) == (3, 2, "float16")
    assert loaded.sources["scheduler.max_num_seqs"] == "flag --max-num-seqs"
    assert loaded.sources["model.seed"] == "env LLMKIT_MODEL__SEED"
    assert loaded.sources["model.dtype"] == f"file {file}:3"
    assert loaded.sources["kv_cache.block_size"] == "default"


# ---- B80: files


@pytest.mark.parametrize("key", ["enable_prefix_caching", "enable-prefix-caching"])
@pytest.mark.parametrize(("name", "text"), [("a.yaml", "{}: false"), ("a.toml", "{} = false")])
def test_false_is_not_dropped(write: Any, key: str, name: str, text: str) -> None:
    loaded = load(file=write(text.format(key), name))
    assert loaded.config.kv_cache.enable_prefix_caching is False


def test_lists_stay_lists(write: Any) -> None:
    for text, name in (("extensions: [a, b]", "a.yaml"), ('extensions = ["a", "b"]', "a.toml")):
        assert load(file=write(text, name)).config.extensions == ("a", "b")
    named = load(file=write("served-model-name: [smol, alias]")).config.server
    assert named.served_model_names == ("smol", "alias")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "scheduler:\n  max-num-seqs: 64\n"),
        ("a.yaml", "scheduler: {max_num_seqs: 64}"),
        ("a.yaml", "max-num-seqs: 64"),
        ("a.toml", "max-num-seqs = 64"),
        ("a.toml", "[scheduler]\nmax_num_seqs = 64"),
        ("a.toml", "scheduler.max-num-seqs = 64"),
    ],
)
def test_spellings(write: Any, name: str, text: str) -> None:
    loaded = load(file=write(text, name))
    assert loaded.config.scheduler.max_num_seqs == 64
    line = 2 if "\n" in text.strip() else 1
    assert loaded.sources["scheduler.max_num_seqs"].endswith(f"{name}:{line}")


def test_a_sections_name_with_a_plain_value_is_the_flag(write: Any) -> None:
    config = load(file=write("scheduler: sjf\nattention: fast\nmodel: /some/folder\n")).config
    assert (config.scheduler.policy, config.attention.backend, config.model.model) == ("sjf", "fast", "/some/folder")


def test_empty_file_and_empty_section(write: Any) -> None:
    assert load(file=write("")).config == load().config
    assert load(file=write("# nothing\nscheduler:\n")).config == load().config


@pytest.mark.parametrize(
    ("name", "text", "pattern"),
    [
        ("a.yaml", "max_num_seq: 1", r"'max_num_seq' \(file .*a\.yaml:1\).*Did you mean max_num_seqs\?.*Valid: "),
        ("a.yaml", "scheduler:\n  max_seqs: 1", r"scheduler\.max_seqs \(file .*a\.yaml:2\).*Valid: policy, max_num"),
        ("a.toml", "[shceduler]\nx = 1", r"Unknown key 'shceduler' \(file .*a\.toml:1\).*Did you mean scheduler\?"),
        ("a.yaml", "plugins:\n  schdler: {a: {b: 1}}", r"plugins\.schdler \(file .*:2\).*no such plugin kind"),
        ("a.yaml", "seed: 1\nseed: 2", r"key seed is given twice in .*a\.yaml: lines 1 and 2"),
        ("a.yaml", "model:\n  seed: 1\n  seed: 2", r"key model\.seed is given twice in .*a\.yaml: lines 2 and 3"),
        ("a.yaml", "max-model-len: 1\nmax_model_len: 2", r"model\.max_model_len is given twice: .*:1 and .*:2"),
        ("a.yaml", "seed: 1\nmodel: {seed: 2}", r"model\.seed is given twice"),
        ("a.toml", "seed = 1\nseed = 2", r"a\.toml .*the key seed is given twice, in lines 1 and 2"),
        ("a.toml", "[model]\nseed = 1\n[scheduler]\n[model]\n", r"the key model is given twice, in lines 1 and 4"),
        ("a.yaml", "seed: 80a", r"model\.seed must be a whole number, at least 0.*; '80a' is not \(file .*a\.yaml:1\)"),
        ("a.yaml", "max_num_seqs: true", r"scheduler\.max_num_seqs must be a whole number.*True is not"),
        ("a.yaml", "max_num_seqs: [1]", r"scheduler\.max_num_seqs must be a whole number"),
        ("a.yaml", "parallel: 3", r"parallel \(file .*a\.yaml:1\) must be a table"),
        ("a.yaml", "plugins: {scheduler: {priority: 3}}", r"plugins\.scheduler\.priority .* must be a table"),
        ("a.yaml", "model: {overrides: 3}", r"model\.overrides \(file .*a\.yaml:1\) must be a table, not 3"),
        ("a.yaml", "plugins: {options: 3}", r"plugins\.options \(file .*a\.yaml:1\) must be a table, not 3"),
        ("a.yaml", "a: &a {b: *a}", r"a\.b in .*a\.yaml:1 contains itself"),
        ("a.yaml", "a: &a [*a]", "contains itself"),
        ("a.yaml", "model: &a\n  <<: *a\n", "contains itself"),
        ("a.yaml", BOMB, "stands for more than 100000 values"),
        ("a.yaml", MERGE_BOMB, "stands for more than 100000 values"),
        ("a.yaml", "seed: " + "[" * 5000 + "]" * 5000, r"not valid YAML: too deeply nested\."),
        ("a.toml", "seed = " + "[" * 5000 + "]" * 5000, r"not valid TOML: too deeply nested\."),
        ("a.yaml", "seed: " + "9" * 5000, "not valid YAML: Exceeds the limit"),
        ("a.toml", "seed = " + "9" * 5000, "not valid TOML: Exceeds the limit"),
        ("a.toml", "seed = " + "9" * 4000, r"model\.seed must be .*; 9{60,80}\.\.\. is not"),
        ("a.yaml", "seed: 0x" + "f" * 5000, r"model\.seed must be .*; <int> is not"),
        ("a.yaml", "dtype: " + "x" * 99_999, r"model\.dtype must be .*; 'x{60,80}\.\.\. is not"),
        ("a.yaml", "seed: 2024-99-99", "not valid YAML: month must be in 1..12"),
        ("a.yaml", "seed: !!int abc", "not valid YAML: invalid literal for int"),
        ("a.yaml", "seed: !!bool abc", "not valid YAML: a value is not of the type that its tag says"),
        ("a.yaml", "seed: !!timestamp abc", "not valid YAML: a value is not of the type that its tag says"),
        ("a.yaml", "seed: \x00", "not valid YAML: unacceptable character"),
        ("a.yaml", "scheduler: {5: 1}", r"The key 5 in .*a\.yaml:1 must be text"),
        ("a.yaml", "seed: 1\n#" + "x" * (1 << 20), r"a\.yaml is larger than 1048576 bytes"),
        ("a.yaml", "backend: x", "could mean attention.backend or structured.backend"),
        ("a.yaml", "- a", r"a\.yaml must hold keys and values, not a list"),
        ("a.yaml", "1: a", r"The key 1 in .*a\.yaml:1 must be text"),
        ("a.yaml", "seed: [", r"a\.yaml is not valid YAML: line 1"),
        ("a.toml", "seed = ", r"a\.toml is not valid TOML: Invalid value"),
        ("a.ini", "seed = 1", r"a\.ini must end in \.toml"),
    ],
)
def test_mistakes_in_files(write: Any, name: str, text: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern) as caught:
        load(file=write(text, name))
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml cannot be read: No such file"):
        load(file=tmp_path / "nothing.yaml")
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(file=tmp_path / "folder.yaml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(file=tmp_path / "bytes.toml")


# ---- environment


def test_a_mark_of_the_byte_order_in_front_is_no_part_of_the_text(tmp_path: Path) -> None:
    for name, text in (("a.toml", "seed = 5\r\n"), ("a.yaml", "seed: 5\r\n")):
        path = tmp_path / name
        path.write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert load(file=path).config.model.seed == 5


def test_anchors_and_merges_that_stay_small_are_used(write: Any) -> None:
    file = write("scheduler: &a {max_num_seqs: 4}\nplugins: {scheduler: {x: &b {y: 1}, z: {<<: *b, w: *a}}}\n")
    assert load(file=file).config.plugins.options["scheduler"]["z"] == {"y": 1, "w": {"max_num_seqs": 4}}


DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("setting", "pattern"),
    [
        ("served_model_names=" + "[" * 100_000, "as JSON; .*: too deeply nested"),
        ('model.overrides={"a":' + DIGITS + "}", "as JSON; .*: Exceeds the limit"),
        (f"max_num_seqs={DIGITS}", r"max_num_seqs must be .*\.\.\. is not"),
        ("x" * 5000 + "=1", r"Unknown key 'x+\.\.\.: there is no such"),
        ("x" * 5000, r"--set 'x+\.\.\. is not of the form"),
    ],
)
def test_text_without_measure(setting: str, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern) as caught:
        load(settings=[setting])
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize("text", [DIGITS, "[" * 5000 + "]" * 5000, "{a=" * 3000 + "1" + "}" * 3000])
def test_an_option_that_is_no_literal_for_its_size_is_text(text: str) -> None:
    loaded = load(settings=[f"scheduler.priority.aging_s={text}"])
    assert loaded.config.plugins.options["scheduler"]["priority"]["aging_s"] == text


class Sullen:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ({"max_num_seqs": Sullen()}, "<Sullen> is not"),
        ({"plugins": Sullen()}, "must be a table of settings, not <Sullen>"),
        ({"max_num_seqs": 10**5000}, "<int> is not"),
        ({"scheduler": {1: 2}}, "The keys of scheduler .* must be text; 1 is not"),
        ({"plugins": {"scheduler": {"priority": {1: 3}}}}, "The keys of plugins.scheduler.priority .* must be text"),
        ({"model": {"overrides": {1: 3}}}, "The keys of model.overrides .* must be text"),
    ],
)
def test_arguments_of_any_kind(flags: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        load(flags=flags, origin="argument")


def test_environment_forms() -> None:
    env = {
        "LLMKIT_DTYPE": "float32",
        "LLMKIT_KV_CACHE__DTYPE": "bfloat16",
        "LLMKIT_ENABLE_PREFIX_CACHING": "no",
        "LLMKIT_MAX_MODEL_LEN": "null",
        "LLMKIT_EXTENSIONS": "a, b",
        "LLMKIT_HF_OVERRIDES": '{"num_hidden_layers": 2}',
        "LLMKIT_SEED": "",
        "LLMKIT_CACHE": "/somewhere",
        "LLMKIT_PLUGINS__SCHEDULER__PRIORITY__AGING_S": "10",
        "LLMKIT_WEIGHTS__FAST__THREADS": "2",
        "HOME": "/root",
    }
    loaded = load(env=env)
    assert loaded.config.model.dtype == "float32"
    assert loaded.config.kv_cache.dtype == "bfloat16"
    assert loaded.config.kv_cache.enable_prefix_caching is False
    assert loaded.config.extensions == ("a", "b")
    assert loaded.config.model.overrides == {"num_hidden_layers": 2}
    assert loaded.config.plugins.options == {
        "scheduler": {"priority": {"aging_s": 10}},
        "weights": {"fast": {"threads": 2}},
    }
    assert loaded.sources["model.seed"] == "default"
    assert loaded.warnings == ()


@pytest.mark.parametrize(
    ("env", "pattern"),
    [
        ({"LLMKIT_MODEL__DTYP": "x"}, r"LLMKIT_MODEL__DTYP sets nothing: .*Did you mean dtype"),
        ({"LLMKIT_SEED": "one"}, r"model\.seed must be .*'one' is not \(env LLMKIT_SEED\)"),
        ({"LLMKIT_SEED": "1", "LLMKIT_MODEL__SEED": "2"}, "given twice: env LLMKIT_MODEL__SEED and env LLMKIT_SEED"),
        ({"LLMKIT_HF_OVERRIDES": "{"}, r"model\.overrides must be a table.*as JSON"),
        ({"LLMKIT_DISABLE_PLUGINS": "fcfs"}, r"plugins\.disable cannot be 'fcfs' \(env LLMKIT_DISABLE_PLUGINS\)"),
    ],
)
def test_mistakes_in_the_environment(env: dict[str, str], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        load(env=env)


def test_variables_of_others_are_left_alone_and_near_misses_are_warned_about() -> None:
    others = {"LLMKIT_SERVICE_HOST": "10.0.0.1", "LLMKIT_PORT": "tcp://10.0.0.1:1"}
    loaded = load(env=others | {"LLMKIT_MAX_MODEL_LENGTH": "9"})
    assert loaded.warnings == ("LLMKIT_MAX_MODEL_LENGTH is no setting; did you mean LLMKIT_MAX_MODEL_LEN?",)


# ---- flags, --set, and arguments from Python


def test_set_reaches_settings_and_plugin_options() -> None:
    loaded = load(
        settings=[
            "scheduler.max-num-seqs=64",
            "dtype=float32",
            "scheduler.priority.aging_s=10",
            "plugins.scheduler.priority.classes=[1, 2]",
            "scheduler.my.module:door.name=fast",
            'attention.fast.text="10"',
            "attention.fast.flag=true",
            "attention.fast.nothing=null",
            "attention.fast.day=2026-01-01",
            "attention.fast.equation=a=b",
            "model.overrides.num_hidden_layers=2",
        ],
        flags={"hf_overrides": {"vocab_size": 7}},
    )
    config = loaded.config
    assert (config.scheduler.max_num_seqs, config.model.dtype) == (64, "float32")
    assert config.plugins.options == {
        "scheduler": {"priority": {"aging_s": 10, "classes": [1, 2]}, "my.module:door": {"name": "fast"}},
        "attention": {"fast": {"text": "10", "flag": True, "nothing": None, "day": "2026-01-01", "equation": "a=b"}},
    }
    assert config.model.overrides == {"num_hidden_layers": 2, "vocab_size": 7}
    assert loaded.sources["plugins.scheduler.priority.aging_s"] == "flag --set scheduler.priority.aging_s"
    values = {s.key: s.value for s in loaded.settings()}
    assert values["plugins.scheduler.priority.aging_s"] == 10
    assert values["model.overrides.vocab_size"] == 7
    assert values["plugins.scheduler.my.module:door.name"] == "fast"


def test_tables_merge_over_the_sources(write: Any) -> None:
    file = write("[plugins.scheduler.priority]\naging_s = 1\nlevels = 3\n[model.overrides]\na = 1\nb = 1", "a.toml")
    loaded = load(file=file, settings=["scheduler.priority.aging_s=2", "model.overrides.b=2"])
    assert loaded.config.plugins.options == {"scheduler": {"priority": {"aging_s": 2, "levels": 3}}}
    assert loaded.config.model.overrides == {"a": 1, "b": 2}
    assert loaded.sources["plugins.scheduler.priority.levels"] == f"file {file}:3"


@pytest.mark.parametrize("form", ["plugins: {scheduler: {p: {x: 1}}}", "plugins: {options: {scheduler: {p: {x: 1}}}}"])
def test_both_forms_of_plugin_options(write: Any, form: str) -> None:
    assert load(file=write(form)).config.plugins.options == {"scheduler": {"p": {"x": 1}}}


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        (["scheduler"], r"--set 'scheduler' is not of the form KEY=VALUE"),
        (["=1"], "not of the form KEY=VALUE"),
        (["nonsense=1"], "Unknown key 'nonsense'"),
        (["nonsense.a.b=1"], "no such section or plugin kind"),
        (["weights.gguf=1"], "Unknown key 'weights.gguf'"),
        (["seed=1", "model.seed=2"], "given twice: flag --set seed and flag --set model.seed"),
    ],
)
def test_mistakes_in_set(settings: list[str], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        load(settings=settings)


def test_flag_and_set_may_not_contradict() -> None:
    with pytest.raises(ConfigError, match=r"given twice: flag --max-num-seqs and flag --set scheduler.max_num_seqs"):
        load(flags={"max-num-seqs": 1}, settings=["scheduler.max_num_seqs=2"])


def test_none_is_not_given() -> None:
    assert load(flags={"max_num_seqs": None, "scheduler.policy": None}).config == load().config


def test_sections_as_arguments() -> None:
    for value in ({"max_num_seqs": 7}, SchedulerConfig(max_num_seqs=7)):
        loaded = load(flags={"scheduler": value}, origin="argument")
        assert loaded.config.scheduler.max_num_seqs == 7
        assert loaded.sources["scheduler.max_num_seqs"] == "argument scheduler.max_num_seqs"


# ---- B82: zero, negative and contradicting settings


@pytest.mark.parametrize(
    ("flag", "value", "pattern"),
    [
        ("max_model_len", 0, r"model\.max_model_len must be a .* at least 1; 0 is not \(flag --max-model-len\)"),
        ("max_model_len", -5, "at least 1; -5 is not"),
        ("block_size", 0, r"kv_cache\.block_size must be a whole number, at least 1; 0 is not \(flag --block-size\)"),
        ("block_size", -1, "at least 1; -1 is not"),
        ("max_num_seqs", 0, "at least 1 and at most 65536; 0 is not"),
        ("max_num_batched_tokens", 0, r"scheduler\.max_num_batched_tokens must be .*at least 1; 0 is not"),
        ("gpu_memory_utilization", 0, "a number, above 0 and at most 1; 0 is not"),
        ("gpu_memory_utilization", 1.5, r"above 0 and at most 1; 1\.5 is not \(flag --gpu-memory-utilization\)"),
        ("gpu_memory_utilization", float("nan"), "above 0 and at most 1; nan is not"),
        ("kv_cache_memory_gib", float("inf"), "a number, above 0; inf is not"),
        ("tensor_parallel_size", 2, "at most 1; 2 is not"),
        ("dtype", "int8", "one of auto, float32, bfloat16, float16; 'int8' is not"),
        ("dtype", "float64", "one of auto, float32, bfloat16, float16; 'float64' is not"),
        ("device", "tpu", r"execution\.device cannot be 'tpu' \(flag --device\)\..*cuda:1"),
        ("seed", -1, "at least 0"),
        ("scheduler", "", r"scheduler\.policy must be"),
        ("async_scheduling", "maybe", "true, false or auto; 'maybe' is not"),
    ],
)
def test_values_out_of_range(flag: str, value: object, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        load(flags={flag: value})


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len .*block_size "):
        load(flags={"max_model_len": 0, "block_size": 0})


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 4, "max_num_seqs": 8},
            r"max_num_batched_tokens \(4\) must be at least max_num_seqs \(8\) .*flag --no-enable-chunked-prefill",
        ),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 65},
            r"max_num_batched_tokens \(64\) must be at least max_model_len \(65\)",
        ),
        ({"num_blocks": 8, "kv_cache_memory_gib": 1}, r"num_blocks \(8\) and memory_gib \(1\) both"),
        ({"connector": "tier", "enable_prefix_caching": False}, "enable_prefix_caching must be true"),
        ({"skip_tokenizer": True, "tokenizer": "x"}, "tokenizer is set, but skip_tokenizer"),
        ({"skip_tokenizer": True, "chat_template": "x"}, "chat_template is set, but skip_tokenizer"),
    ],
)
def test_contradictions(flags: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        load(flags=flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 256},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 64, "max_num_seqs": 64},
        {"enable_chunked_prefill": False},
        {"async_scheduling": True, "device": "cuda:1", "plugins.disable": ["scheduler:x"]},
    ],
)
def test_settings_that_go_together(flags: dict[str, Any]) -> None:
    sources = load(flags=flags).sources
    assert sum(source.startswith("flag") for source in sources.values()) == len(flags)


def test_a_kubernetes_service_called_llmkit_sets_no_port() -> None:
    env = {"LLMKIT_PORT": "tcp://10.0.0.7:8000", "LLMKIT_PORT_8000_TCP": "tcp://10.0.0.7:8000"}
    assert load_config(env=env).config.server.port == 8000
    with pytest.raises(ConfigError, match=r"server\.port must be a whole number"):
        load_config(env={"LLMKIT_PORT": "80a"})


def test_keys_of_the_server_are_not_shown() -> None:
    loaded = load_config(flags={"api_key": "geheim,auch"}, env={})
    assert loaded.config.server.api_keys == ("geheim", "auch")
    (shown,) = [setting.value for setting in loaded.settings() if setting.key == "server.api_keys"]
    assert shown == "***"
    for bad in ('["geheim"', '["geheim", 3]'):
        with pytest.raises(ConfigError, match="api_keys") as caught:
            load_config(flags={"server.api_keys": bad}, env={})
        assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ({"ssl_keyfile": "key.pem"}, ("ssl_keyfile", "ssl_certfile")),
        ({"allowed_origins": "*", "allow_credentials": True}, ("allow_credentials", "allowed_origins")),
    ],
)
def test_settings_of_the_server_that_contradict_each_other(flags: dict[str, Any], keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags=flags, env={})
    assert all(key in str(caught.value) for key in keys)
