"""The table of settings, from which the command line and the reference are made."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from llmkit.config import EngineConfig, all_flags, load_config
from llmkit.config.flags import flat_names, section_types
from llmkit.config.reference import render_reference
from llmkit.hookspecs.kinds import KINDS

BY_KEY = {flag.key: flag for flag in all_flags()}


def test_every_field_has_a_flag() -> None:
    keys = {f"{section}.{name}" for section, model in section_types().items() for name in model.model_fields}
    assert set(BY_KEY) == keys | {"extensions"}
    assert [flag.key for flag in all_flags() if not flag.name] == ["plugins.options"]
    names = [flag.name for flag in all_flags() if flag.name]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("scheduler.max_num_batched_tokens", "--max-num-batched-tokens"),
        ("scheduler.max_num_seqs", "--max-num-seqs"),
        ("model.max_model_len", "--max-model-len"),
        ("kv_cache.gpu_memory_utilization", "--gpu-memory-utilization"),
        ("kv_cache.block_size", "--block-size"),
        ("parallel.tensor_parallel_size", "--tensor-parallel-size"),
        ("model.dtype", "--dtype"),
        ("kv_cache.dtype", "--kv-cache-dtype"),
        ("model.seed", "--seed"),
        ("model.load_format", "--load-format"),
        ("scheduler.policy", "--scheduler"),
        ("attention.backend", "--attention"),
        ("execution.executor", "--executor"),
    ],
)
def test_flags_have_the_names_that_users_know(key: str, name: str) -> None:
    assert BY_KEY[key].name == name


def test_booleans_can_be_switched_off() -> None:
    flag = BY_KEY["kv_cache.enable_prefix_caching"]
    assert (flag.type, flag.name, flag.negative) == ("boolean", "--enable-prefix-caching", "--no-enable-prefix-caching")
    assert BY_KEY["model.seed"].negative is None


def test_types_and_variables() -> None:
    assert {BY_KEY[key].type for key in ("model.max_model_len", "scheduler.max_num_seqs")} == {"integer"}
    assert BY_KEY["kv_cache.memory_gib"].type == "number"
    assert BY_KEY["plugins.disable"].type == "list"
    assert BY_KEY["model.overrides"].type == "table"
    assert BY_KEY["model.dtype"].choices == ("auto", "float32", "bfloat16", "float16")
    assert (BY_KEY["model.dtype"].env, BY_KEY["model.dtype"].flat_env) == ("LLMKIT_MODEL__DTYPE", "LLMKIT_DTYPE")
    assert BY_KEY["model.max_model_len"].optional
    assert not BY_KEY["model.seed"].optional


def test_every_kind_that_is_chosen_has_its_key_and_flag() -> None:
    for kind in KINDS:
        if kind.config_key:
            assert BY_KEY[kind.config_key].plugin_kind == kind.name
            assert kind.flag in (None, BY_KEY[kind.config_key].name)


def test_every_flat_name_of_a_flag_means_one_setting() -> None:
    assert all(flat_names()[flag.flat_name] == (flag.key,) for flag in all_flags() if flag.name)


@pytest.mark.parametrize("flag", [flag for flag in all_flags() if flag.name], ids=lambda flag: flag.key)
def test_every_default_can_be_given_as_a_flag_and_as_a_variable(flag: object) -> None:
    from llmkit.config import Flag

    assert isinstance(flag, Flag)
    given = flag.default
    assert load_config(flags={flag.key: given}, env={}).config == EngineConfig()
    text = "null" if given is None else given if isinstance(given, str) else json.dumps(given)
    assert load_config(env={flag.env: text}).config == EngineConfig()
    assert load_config(env={str(flag.flat_env): text}).config == EngineConfig()


def test_every_setting_is_described() -> None:
    assert [flag.key for flag in all_flags() if len(flag.description) < 10] == []


def test_reference_lists_every_setting() -> None:
    text = render_reference()
    for flag in all_flags():
        assert f"| `{flag.key}` | " in text
    widths = {line.count(" | ") for line in text.splitlines() if line.startswith("| `")}
    assert widths == {5}


def test_configuration_imports_no_torch() -> None:
    code = "import sys, llmkit.config, llmkit.config.reference; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "False", result.stderr
