"""DecoderConfig: where each value comes from, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from llmkit.errors import ModelError
from llmkit.layers.config import DecoderConfig

SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}


def read(**changes: Any) -> DecoderConfig:
    return DecoderConfig.from_hf({**SMALL, **changes})


def test_missing_keys_take_the_defaults_of_hugging_face() -> None:
    config = read()
    assert config.num_key_value_heads == 4
    assert config.head_dim == 16
    assert config.max_position_embeddings == 2048
    assert config.rms_norm_eps == 1e-6
    assert config.activation == "silu"
    assert config.tie_word_embeddings is False
    assert config.rope.theta == 10_000.0
    assert config.rope.rope_type == "default"
    assert config.rope.rotary_dim == 16
    assert config.dtype is None
    assert config.eos_token_ids == ()


def test_null_counts_as_missing() -> None:
    config = read(num_key_value_heads=None, head_dim=None, rope_scaling=None, sliding_window=None, eos_token_id=None)
    assert (config.num_key_value_heads, config.head_dim, config.sliding_window) == (4, 16, None)


@pytest.mark.parametrize(
    ("keys", "theta"),
    [
        ({}, 10_000.0),
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, 1e5),
        ({"rope_parameters": {"rope_theta": 1e5}, "rope_theta": 7.0}, 1e5),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 3e4}, 3e4),
        ({"rope_parameters": {"rope_type": "default"}}, 10_000.0),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 2e4}, 2e4),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 4e4}}, 4e4),
        ({"rope_theta": 10_000}, 10_000.0),
    ],
)
def test_theta_is_found_wherever_it_stands(keys: dict[str, Any], theta: float) -> None:
    assert read(**keys).rope.theta == theta


def test_the_old_key_of_rope_type_and_the_old_place_of_scaling() -> None:
    rope = read(rope_scaling={"type": "linear", "factor": 4}, rope_parameters={"rope_type": "default"}).rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)


def test_llama3_parameters() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }
    rope = read(rope_scaling=scaling, max_position_embeddings=131072).rope
    assert (rope.factor, rope.low_freq_factor, rope.high_freq_factor, rope.original_length) == (8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
    ],
)
def test_dtype_under_either_key(keys: dict[str, Any], expected: str) -> None:
    assert read(**keys).dtype == expected


def test_end_of_sequence_is_one_id_or_several() -> None:
    assert read(eos_token_id=2).eos_token_ids == (2,)
    assert read(eos_token_id=[2, 30]).eos_token_ids == (2, 30)


def test_window_of_qwen() -> None:
    config = read(use_sliding_window=False, sliding_window=32, max_window_layers=2)
    assert [config.window_by_layer(i) for i in range(4)] == [None] * 4
    config = read(use_sliding_window=True, sliding_window=32, max_window_layers=2)
    assert [config.window_by_layer(i) for i in range(4)] == [None, None, 32, 32]
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = read(use_sliding_window=True, sliding_window=32, max_window_layers=2, layer_types=kinds)
    assert [config.window_by_layer(i) for i in range(4)] == [32, None, 32, None]


def test_a_pattern_of_windows() -> None:
    config = read(sliding_window=8, sliding_window_pattern=3)
    assert [config.window_by_layer(i) for i in range(4)] == [8, 8, None, 8]


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "factor": 8.0, "rope_type": "linear"},
                             "sliding_attention": {"rope_theta": 1e4}}},
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        {"rope_local_base_freq": 1e4, "rope_theta": 1e6,
         "rope_parameters": {"full_attention": {"factor": 8.0, "rope_type": "linear"}, "sliding_attention": {}}},
    ],
)  # fmt: skip
def test_rope_by_kind_of_layer(keys: dict[str, Any]) -> None:
    config = read(sliding_window=8, sliding_window_pattern=2, **keys)
    assert [config.rope_of_layer(i).theta for i in range(4)] == [1e4, 1e6, 1e4, 1e6]
    assert [config.rope_of_layer(i).factor for i in range(4)] == [1.0, 8.0, 1.0, 8.0]
    assert config.rope == config.rope_of_layer(1)


def test_a_kind_of_layer_without_rope_is_named() -> None:
    config = read(sliding_window=8, sliding_window_pattern=2, rope_parameters={"full_attention": {"rope_theta": 1.0}})
    with pytest.raises(ModelError, match="not for 'sliding_attention', which layer 0 is"):
        config.rope_of_layer(0)


@pytest.mark.parametrize("old", ["su", "yarn"])
def test_longrope_and_its_old_names(old: str) -> None:
    factors = {"short_factor": [1] * 8, "long_factor": [2.0] * 8}
    keys = {"original_max_position_embeddings": 32, "max_position_embeddings": 128}
    rope = read(rope_parameters={"rope_type": "longrope", **factors}, **keys).rope
    assert rope == read(rope_scaling={"type": old, **factors}, **keys).rope
    assert (rope.rope_type, rope.factor, rope.original_length, rope.long_factors) == ("longrope", 4.0, 32, (2.0,) * 8)


def test_defaults_of_an_architecture_fill_missing_keys_only() -> None:
    config = read(sliding_window=None).with_defaults({"sliding_window": 4096, "num_key_value_heads": 2})
    assert config.sliding_window is None
    assert config.num_key_value_heads == 2
    assert read().with_defaults({"sliding_window": 4096}).sliding_window == 4096


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"hidden_size": None}, ["lacks hidden_size"]),
        ({"vocab_size": "100"}, ["vocab_size", "'100'", "integer of at least 1"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "divisor of num_attention_heads = 4"]),
        ({"num_attention_heads": 5}, ["hidden_size", "multiple of num_attention_heads = 5"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps", "greater than 0"]),
        ({"hidden_act": "relu"}, ["hidden_act", "'relu'", "silu"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        ({"dtype": "float64"}, ["dtype", "float64", "bfloat16"]),
        ({"torch_dtype": "int8"}, ["torch_dtype", "int8"]),
        ({"sliding_window": -1}, ["sliding_window", "at least 1"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "num_hidden_layers = 4"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
        ({"rope_theta": "big"}, ["rope_theta"]),
        ({"rope_scaling": [1]}, ["rope_scaling", "object"]),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2}}, ["rope_scaling.rope_type", "spiral", "llama3"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["lacks rope_scaling.short_factor"]),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0]}}, ["short_factor", "list of 8 numbers"]),
        ({"hidden_activation": "relu"}, ["hidden_activation", "'relu'"]),
        ({"rope_scaling": {"type": "linear"}}, ["lacks rope_scaling.factor"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, ["lacks rope_parameters.low_freq_factor"]),
        ({"rope_parameters": {"full_attention": {}, "factor": 2.0}}, ["rope_parameters", "full_attention"]),
        ({"partial_rotary_factor": 0.2, "head_dim": 15}, ["partial_rotary_factor"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config"]),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        read(**changes)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False, "sliding_window": 8}, "no sliding"),
    ],
)
def test_unusable_layer_types_are_named_by_index(changes: dict[str, Any], part: str) -> None:
    with pytest.raises(ModelError, match=rf"layer_types\[1\].*{part}"):
        read(**changes).window_by_layer(1)


@pytest.mark.parametrize("key", ["num_hidden_layers", "vocab_size", "hidden_size"])
def test_numbers_beyond_any_model(key):
    """A damaged file must not ask for billions of layers: they would be built one by one."""
    raw = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8}
    with pytest.raises(ModelError, match=f"{key} = .*at most"):
        DecoderConfig.from_hf(raw | {key: 2**31})
