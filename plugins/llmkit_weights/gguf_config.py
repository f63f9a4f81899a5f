"""GGUF metadata → the keys of a Hugging Face config.json and generation_config.json."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from llmkit.errors import ModelError
from llmkit_weights.gguf_architectures import EXTRAS, KNOWN, architecture_of
from llmkit_weights.gguf_file import GgufFile

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# GGUF key after "general.sampling." → generation_config.json key.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Tokens that end a chat turn, which a file may have without naming them in its metadata.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>")
_CONTROL_TOKEN = 3


def model_config(file: GgufFile) -> dict[str, Any]:
    """The config.json that `file` amounts to. Raises ModelError for an architecture that is not known."""
    name = file.get("general.architecture")
    architecture = architecture_of(file)
    if architecture is None:
        kind = f"{name} with experts" if name in KNOWN else name
        raise ModelError(
            f"{file.path} holds a model of architecture {kind!r}, which the GGUF reader cannot map; "
            f"known: {', '.join(KNOWN)}."
        )
    read = _Keys(file, name)
    heads = read.required("attention.head_count")
    hidden = read.required("embedding_length")
    head_dim = read.get("attention.key_length") or hidden // heads
    if read.get("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path} has keys and values of different sizes, which is not supported.")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": name,
        "hidden_size": hidden,
        "intermediate_size": read.required("feed_forward_length"),
        "num_hidden_layers": read.required("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": read.required("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read.required("context_length"),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": name == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "initializer_range": 0.02,
        "rope_parameters": _rope(file, read, head_dim),
    }
    if architecture in EXTRAS:
        config |= {key: value for key, value in EXTRAS[architecture](file, read).items() if value is not None}
    if (dtype := _dtype(file)) is not None:
        config["dtype"] = dtype
    return config | _token_ids(file)


def generation_config(file: GgufFile) -> dict[str, Any]:
    """The generation_config.json that `file` amounts to: end tokens, and sampling defaults if it has any."""
    config = _token_ids(file)
    ends = [config.pop("eos_token_id", None), *(file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eot", "eom"))]
    ends += _turn_ends(file)
    if ids := list(dict.fromkeys(token_id for token_id in ends if token_id is not None)):
        config["eos_token_id"] = ids[0] if len(ids) == 1 else ids
    for key, name in _SAMPLING.items():
        if (value := file.get(f"general.sampling.{key}")) is not None:
            config[name] = value
    return config


class _Keys:
    """Metadata under the architecture's prefix."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._prefix = file, architecture

    def get(self, key: str, default: Any = None) -> Any:
        value = self._file.get(f"{self._prefix}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{self._file.path} has a {self._prefix}.{key} per layer, which is not supported.")
            return value[0]
        return value

    def required(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"{self._file.path} lacks the metadata key {self._prefix}.{key}.")
        return value


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} lacks the tensor token_embd.weight.")
    return embedding.shape[0]


def _dtype(file: GgufFile) -> str | None:
    """The type that most weight matrices have; None if they are quantised, for then there is no original type."""
    types = Counter(tensor.type_name for tensor in file.tensors.values() if len(tensor.shape) > 1)
    return _DTYPES.get(types.most_common(1)[0][0])


def _token_ids(file: GgufFile) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids = {key: file.get(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
    return {key: token_id for key, token_id in ids.items() if token_id is not None}


def _turn_ends(file: GgufFile) -> list[int]:
    types = file.get("tokenizer.ggml.token_type") or []
    if _CONTROL_TOKEN not in types:
        return []
    tokens = file.get("tokenizer.ggml.tokens") or []
    control = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == _CONTROL_TOKEN}
    return [control[token] for token in _TURN_ENDS if token in control]


def _rope(file: GgufFile, read: _Keys, head_dim: int) -> dict[str, Any]:
    theta = read.get("rope.freq_base", 10_000.0)
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    rotary_dim = read.get("rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    if "rope_freqs.weight" in file.tensors:
        return rope | _llama3_scaling(file, theta, rotary_dim)
    kind = read.get("rope.scaling.type", "none")
    if kind == "none" or "rope_factors_long.weight" in file.tensors:
        return rope
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path} has rope scaling {kind!r}, which the GGUF reader cannot map.")
    rope |= {"rope_type": kind, "factor": read.required("rope.scaling.factor")}
    optional = {
        "original_max_position_embeddings": "original_context_length",
        "attention_factor": "yarn_attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    values = {name: read.get(f"rope.scaling.{key}") for name, key in optional.items()}
    return rope | {name: value for name, value in values.items() if value is not None}


def _llama3_scaling(file: GgufFile, theta: float, rotary_dim: int) -> dict[str, Any]:
    """The parameters behind rope_freqs, which has only their result: a divisor for each frequency.

    The factor is the largest divisor. The rest is the same in every Llama since 3.1; it is checked against the
    table, so that another choice is an error and not a slightly wrong model."""
    from llmkit_weights.gguf_values import read_array

    table = read_array(file, file.tensors["rope_freqs.weight"]).tolist()
    scaling = {"rope_type": "llama3", "factor": max(table), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for original in (8192, 4096, 16384, 32768):
        expected = _llama3_divisors(theta, rotary_dim, scaling["factor"], original)
        if len(table) == len(expected) and all(
            math.isclose(a, b, rel_tol=1e-3) for a, b in zip(table, expected, strict=True)
        ):
            return scaling | {"original_max_position_embeddings": original}
    raise ModelError(f"{file.path} has a rope_freqs.weight that is no known rope scaling.")


def _llama3_divisors(theta: float, rotary_dim: int, factor: float, original: int) -> list[float]:
    """Frequencies with a wavelength above original/low are divided by `factor`, those below original/high are left,
    and between them the two are blended (Llama 3.1's scaling, low = 1, high = 4)."""
    low, high = 1.0, 4.0
    divisors = []
    for i in range(0, rotary_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / rotary_dim)
        blend = min(max((original / wavelength - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - blend) / factor + blend))
    return divisors
