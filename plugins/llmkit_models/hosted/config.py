"""Configurations: which models transformers has code for, and what the core has to know of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmkit.errors import ModelError, described

ORIGINAL = "transformers_config"
"""Key under which the translated configuration keeps the model's own."""

EXAMPLE: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 5.0,
}

_LAYER_KINDS = frozenset({"full_attention", "sliding_attention"})
# As the model's file has them: a default of the class would be a token that the file knows nothing of.
_VERBATIM = ("architectures", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")


def reasons_against(raw: Mapping[str, Any]) -> list[str]:
    """Why the model with this `config.json` cannot be hosted, as far as its configuration tells."""
    import transformers

    architecture = _architecture(raw)
    if architecture is None:
        names = ", ".join(raw.get("architectures") or ())
        return [f"transformers {transformers.__version__} has no causal language model called {names}"]
    try:
        config = hf_config(raw)
        text = text_config(config)
    except ModelError as error:
        return [error.message]
    reasons = []
    if config.is_encoder_decoder:
        reasons.append("it is an encoder-decoder model")
    kinds = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_KINDS)
    if kinds:
        reasons.append(f"it has layers other than full and sliding attention: {', '.join(kinds)}")
    if raw.get("quantization_config") is not None:
        reasons.append("its weights are stored quantized")
    return reasons


def hf_config(raw: Mapping[str, Any]) -> Any:
    """The configuration as transformers has it, a new object. Raises ModelError if transformers refuses it."""
    from transformers import CONFIG_MAPPING

    architecture = _architecture(raw)
    model_type = raw.get("model_type") or (None if architecture is None else _causal_models()[architecture])
    try:
        # Code that comes with the model is never run: `auto_map` would name it.
        return CONFIG_MAPPING[model_type].from_dict({k: v for k, v in raw.items() if k != "auto_map"})
    except Exception as error:
        raise ModelError(f"transformers cannot read the model's config.json: {described(error)}") from error


def text_config(config: Any) -> Any:
    """The part of a configuration that is about text. Raises ModelError if there are several."""
    try:
        return config.get_text_config()
    except ValueError as error:
        raise ModelError("The model consists of several models of text.") from error


def model_class(raw: Mapping[str, Any]) -> Any:
    """The class of the model. Imports its code. Raises ModelError if there is none."""
    import transformers

    name = _architecture(raw)
    found = None if name is None else getattr(transformers, name, None)
    if found is None:
        raise ModelError(
            f"transformers {transformers.__version__} has no causal language model called {raw.get('architectures')}."
        )
    return found


def core_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What the core reads, under the keys that it reads; the model's own configuration is under ORIGINAL.

    Sizes that transformers keeps in another form stand for a decoder of about the same size: they only go into the
    estimate of what a step takes. What attention stores is taken from the model itself.
    """
    text = text_config(hf_config(raw))
    hidden = text.hidden_size
    heads = _integer(text, "num_attention_heads", 1)
    kv_heads = _integer(text, "num_key_value_heads", heads)
    core: dict[str, Any] = {
        "model_type": text.model_type,
        "vocab_size": text.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": _integer(text, "intermediate_size", 4 * hidden),
        "num_hidden_layers": text.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if heads % kv_heads == 0 else heads,
        "head_dim": _integer(text, "head_dim", max(1, hidden // heads)),
        "tie_word_embeddings": bool(getattr(text, "tie_word_embeddings", False)),
    }
    core["head_dim"] += core["head_dim"] % 2  # rotary parameters are read from it, and not used
    if hasattr(text, "max_position_embeddings"):
        core["max_position_embeddings"] = text.max_position_embeddings
    return core | {key: raw[key] for key in _VERBATIM if key in raw} | {ORIGINAL: dict(raw)}


def _integer(config: Any, name: str, default: int) -> int:
    try:
        value = getattr(config, name, None)
    except Exception:  # some configurations refuse to tell what differs by layer
        value = None
    return value if isinstance(value, int) and value > 0 else default


def _architecture(raw: Mapping[str, Any]) -> str | None:
    """The first of the model's architectures that transformers has as a causal language model."""
    return next((name for name in raw.get("architectures") or () if name in _causal_models()), None)


def _causal_models() -> dict[str, str]:
    """Name of the class → model type; of several the one that the class is called after."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types: dict[str, str] = {}
    for model_type, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if isinstance(name, str) and (name not in types or name.lower().startswith(model_type.replace("_", ""))):
            types[name] = model_type
    return types
