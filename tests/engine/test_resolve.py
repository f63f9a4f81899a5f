"""Defaults that depend on the device and the model."""

from __future__ import annotations

import warnings

import pytest

from llmkit import ConfigError, EngineConfig, Environment, ModelError
from llmkit.config import load_config
from llmkit.engine.device import has_fast_bfloat16, resolve_device, usable_processors
from llmkit.engine.resolve import batch_defaults, longest_sequence, resolve_config, resolve_dtype, stated_dtype
from llmkit.registry import detect_environment
from llmkit_cli.commands.collect_env import torch_facts

PLAIN_CPU = Environment()
FAST_CPU = Environment(cpu_flags=frozenset({"avx512_bf16"}))
ARM_CPU = Environment(machine="aarch64", cpu_flags=frozenset({"asimd", "bf16"}))
OLD_GPU = Environment("cuda", (7, 5))
NEW_GPU = Environment("cuda", (9, 0))
MODEL = {"max_position_embeddings": 8192, "torch_dtype": "bfloat16"}


def config(**settings) -> EngineConfig:
    return load_config(flags=settings, env={}).config


def resolved(environment=PLAIN_CPU, model=MODEL, gpu_bytes=None, **settings):
    device = environment.device_type
    return resolve_config(config(**settings), model, device=device, environment=environment, gpu_bytes=gpu_bytes)


@pytest.mark.parametrize(
    ("stated", "environment", "dtype"),
    [
        ("bfloat16", PLAIN_CPU, "float32"),
        ("bfloat16", FAST_CPU, "bfloat16"),
        ("bfloat16", ARM_CPU, "bfloat16"),
        ("float16", FAST_CPU, "float32"),
        ("float32", FAST_CPU, "float32"),
        (None, FAST_CPU, "float32"),
        (None, NEW_GPU, "bfloat16"),
        (None, OLD_GPU, "float16"),
        ("float32", NEW_GPU, "float32"),
        ("float16", NEW_GPU, "float16"),
        ("bfloat16", OLD_GPU, "float16"),
    ],
)
def test_dtype_auto(stated, environment, dtype):
    """B88."""
    assert resolve_dtype(stated, environment) == dtype


def test_the_checkpoints_dtype():
    assert stated_dtype({"torch_dtype": "torch.float16"}) == "float16"
    assert stated_dtype({"dtype": "bfloat16", "torch_dtype": "float32"}) == "bfloat16"
    assert stated_dtype({}) is None
    with pytest.raises(ModelError, match="float64"):
        stated_dtype({"dtype": "float64"})


def test_batch_sizes_by_device():
    assert batch_defaults(PLAIN_CPU, None).max_num_batched_tokens == 2048
    assert batch_defaults(NEW_GPU, 140 * 2**30).max_num_seqs == 1024
    assert batch_defaults(NEW_GPU, 24 * 2**30).max_num_batched_tokens == 8192


@pytest.mark.parametrize(
    ("environment", "gpu_bytes", "offline", "online"),
    [
        (PLAIN_CPU, None, (2048, 256), (2048, 128)),
        (NEW_GPU, 24 * 2**30, (8192, 256), (2048, 256)),
        (NEW_GPU, 140 * 2**30, (16384, 1024), (8192, 1024)),
    ],
)
def test_a_server_has_shorter_steps(environment, gpu_bytes, offline, online):
    device = environment.device_type
    for is_online, expected in ((False, offline), (True, online)):
        done = resolve_config(
            config(), MODEL, device=device, environment=environment, gpu_bytes=gpu_bytes, online=is_online
        )
        assert (done.scheduler.max_num_batched_tokens, done.scheduler.max_num_seqs) == expected


@pytest.mark.parametrize(("online", "given", "wait_s"), [(True, None, 15.0), (True, 3, 3.0), (False, None, None)])
def test_only_an_engine_that_serves_lets_no_grammar_wait_for_ever(online, given, wait_s):
    settings = {} if given is None else {"compile_wait_s": given}
    done = resolve_config(config(**settings), MODEL, device="cpu", environment=PLAIN_CPU, online=online)
    assert done.structured.compile_wait_s == wait_s


def test_who_names_a_type_has_its_arithmetic():
    assert resolved().model.quantization == "auto"
    assert resolved(dtype="float32").model.quantization == "none"
    assert resolved(dtype="float32", quantization="int8").model.quantization == "int8"


def test_everything_is_filled_in():
    done = resolved()
    assert (done.model.dtype, done.kv_cache.dtype, done.model.max_model_len) == ("float32", "float32", 8192)
    assert (done.scheduler.max_num_batched_tokens, done.scheduler.max_num_seqs) == (2048, 256)
    assert (done.execution.device, done.execution.num_threads) == ("cpu", usable_processors())


def test_what_was_given_stays():
    done = resolved(dtype="float16", max_model_len=64, max_num_seqs=3, max_num_batched_tokens=16, num_threads=7)
    assert (done.model.dtype, done.model.max_model_len, done.execution.num_threads) == ("float16", 64, 7)
    assert (done.scheduler.max_num_batched_tokens, done.scheduler.max_num_seqs) == (16, 3)
    assert resolved(**{"kv_cache.dtype": "bfloat16"}).kv_cache.dtype == "bfloat16"
    assert resolved(max_num_seqs=4000).scheduler.max_num_batched_tokens == 4000


def test_lengths():
    assert longest_sequence({"max_position_embeddings": 100}) == 100
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}
    assert longest_sequence({"max_position_embeddings": 100, "rope_scaling": yarn}) == 400
    assert longest_sequence({"max_position_embeddings": 400, "rope_scaling": yarn}) == 400
    assert longest_sequence({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 2}}) == 200
    assert longest_sequence({"max_position_embeddings": 100, "rope_scaling": {"type": "dynamic", "factor": 2}}) == 100
    llama = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 100}
    assert longest_sequence({"max_position_embeddings": 800, "rope_scaling": llama}) == 800
    for wrong in ({}, {"max_position_embeddings": 0}, {"max_position_embeddings": "8k"}):
        with pytest.raises(ModelError, match="max_position_embeddings"):
            longest_sequence(wrong)
    with pytest.raises(ConfigError, match="1 to 8192"):
        resolved(max_model_len=9000)


def test_without_chunked_prefill_a_whole_prompt_fits_a_step():
    assert resolved(enable_chunked_prefill=False).scheduler.max_num_batched_tokens == 8192
    with pytest.raises(ConfigError, match="whole prompt"):
        resolved(enable_chunked_prefill=False, max_num_batched_tokens=4096)


def test_devices():
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") in ("cpu", "cuda")
    for wrong in ("tpu", "cuda:", "cuda:a", "cuda:99", ""):
        with pytest.raises(ConfigError, match="device"):
            resolve_device(wrong)
    assert not has_fast_bfloat16(PLAIN_CPU)


OLD_DRIVER = "CUDA initialization: The NVIDIA driver on your system is too old (found version 9000)."


@pytest.fixture
def old_driver(monkeypatch):
    """torch as it is with a driver that is too old for it."""

    def is_available():
        warnings.warn(f"{OLD_DRIVER} (Triggered internally at /pytorch/c10/cuda/CUDAFunctions.cpp:119.)", stacklevel=2)
        return False

    monkeypatch.setattr("torch.cuda.is_available", is_available)


@pytest.mark.usefixtures("old_driver")
def test_why_torch_finds_no_gpu_is_told_once_and_in_one_place(caplog):
    assert resolve_device("auto") == "cpu"
    (record,) = caplog.records
    assert record.getMessage() == f"no CUDA device can be used, so the engine runs on the CPU: {OLD_DRIVER}"
    with pytest.raises(ConfigError, match=r"no CUDA device can be used here: CUDA initialization: .* too old"):
        resolve_device("cuda")
    assert detect_environment("cuda").compute_capability is None
    assert torch_facts()["no cuda device"] == OLD_DRIVER
