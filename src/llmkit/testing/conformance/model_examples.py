"""Small models of any architecture: their configuration, and the same model in transformers with random weights."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llmkit.testing.conformance.arguments import SMALL_MODEL

if TYPE_CHECKING:
    import torch

    from llmkit.hookspecs.kernels import KernelTable
    from llmkit.hookspecs.plugin import Environment
    from llmkit.hookspecs.quantization import QuantizationMethod
    from llmkit.layers.context import ModelContext
    from llmkit.registry import LoadedPlugin, Registry

SHRUNK: dict[str, Any] = {
    **SMALL_MODEL,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "sliding_window": 9,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "num_experts": 6,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
"""What a configuration class of transformers is made with, as far as it has such keys."""


def example_config(plugin: LoadedPlugin) -> dict[str, Any]:
    """The `config.json` of a small model for the plugin: its own example, else the shrunk configuration of the
    architecture that it is called by in transformers, else a plain decoder."""
    given = plugin.ask("llmkit_model_example")
    if given is not None:
        return dict(given)
    return shrunk_config(plugin.row.name) or {"architectures": [plugin.row.name], **SMALL_MODEL}


def shrunk_config(architecture: str) -> dict[str, Any] | None:
    """The configuration of an architecture of transformers with small sizes and few layers; None if transformers has no
    such causal language model."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    kinds = [kind for kind, name in NAMES.items() if name == architecture]
    if not kinds:
        return None
    # Some architectures serve several types of model; the one that they are called after comes first.
    model_type = min(kinds, key=lambda kind: not architecture.lower().startswith(kind.replace("_", "")))
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    config = config_class(**{key: value for key, value in SHRUNK.items() if key in known})
    raw = {key: value for key, value in config.to_dict().items() if value is not None}
    return {**raw, "architectures": [architecture], "model_type": model_type}


def context_for(
    raw: dict[str, Any],
    plugin: LoadedPlugin,
    registry: Registry,
    environment: Environment,
    *,
    dtype: torch.dtype | None = None,
    device: str | None = None,
    quantization: str = "none",
) -> ModelContext:
    """A context for a model of the plugin with the `config.json` `raw`. dtype: float32 by default; device: that of the
    environment."""
    import torch

    from llmkit.layers.config import DecoderConfig
    from llmkit.layers.context import ModelContext

    translated = plugin.ask("llmkit_model_config", config=raw)
    return ModelContext(
        config=DecoderConfig.from_hf(raw if translated is None else translated),
        dtype=dtype or torch.float32,
        device=torch.device(device or environment.device_type),
        kernels=cast("KernelTable", registry.create("kernels", "auto", environment)),
        quantization=cast("QuantizationMethod", registry.create("quantization", quantization, environment)),
    )


def reference_model(raw: dict[str, Any]) -> Any:
    """The model that transformers has for this configuration, in float32 on the CPU with random weights, norms and
    biases too: their initial values would hide a forgotten one. None if transformers has none."""
    import torch
    import transformers
    from transformers import CONFIG_MAPPING

    (architecture,) = raw["architectures"]
    model_class = getattr(transformers, architecture, None)
    if model_class is None or raw.get("model_type") not in CONFIG_MAPPING:
        return None
    config = CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return model


def checkpoint_of(model: Any) -> dict[str, torch.Tensor]:
    """The tensors of a model of transformers as it saves them: under the names of checkpoints, which are not always
    those of its parameters."""
    from safetensors.torch import load_file
    from transformers.utils import logging

    logging.disable_progress_bar()
    tensors: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        for file in sorted(Path(folder).glob("*.safetensors")):
            tensors |= load_file(file)
    return tensors
