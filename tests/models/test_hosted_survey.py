"""Every causal language model of transformers, made small: hosted with the logits that it has there, or refused.

Takes minutes, so it runs only with LLMKIT_DEEP_TESTS=1; `-rs` lists what is refused and why.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from llmkit.errors import ModelError
from llmkit.registry import Registry, detect_environment
from llmkit.testing.conformance.model_examples import checkpoint_of, context_for, reference_model, shrunk_config
from llmkit.testing.models import ModelTrial, relative_error
from llmkit_attention.torch_backend import TorchAttention

pytestmark = [
    pytest.mark.skipif(not os.environ.get("LLMKIT_DEEP_TESTS"), reason="takes minutes; LLMKIT_DEEP_TESTS=1 runs it"),
    pytest.mark.filterwarnings("ignore"),  # of transformers' own code
]


def architectures() -> list[str]:
    """Of models of text alone: the parts of others do not get small by the same keys."""
    if not os.environ.get("LLMKIT_DEEP_TESTS"):
        return []
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return sorted({n for kind, n in NAMES.items() if isinstance(n, str) and not CONFIG_MAPPING[kind].sub_configs})


def small_reference(architecture: str) -> tuple[dict[str, Any], Any]:
    try:
        raw = shrunk_config(architecture)
        assert raw is not None
        theirs = reference_model(raw)
        with torch.inference_mode():
            theirs(torch.zeros((1, 3), dtype=torch.int64), use_cache=False)
    except Exception as error:
        pytest.skip(f"cannot be made small: {type(error).__name__}")
    return raw, theirs


@pytest.mark.parametrize("architecture", architectures())
def test_it_is_right_or_refused(architecture: str) -> None:
    raw, theirs = small_reference(architecture)
    registry, environment = Registry.discover(), detect_environment("cpu")
    plugin = registry.load("model", "transformers")
    reasons = plugin.ask("llmkit_model_support", config=raw).reasons
    if reasons:
        pytest.skip(f"refused: {'; '.join(reasons)}")
    try:
        context = context_for(raw, plugin, registry, environment)
        model = registry.build(plugin, {"context": context})
    except ModelError as error:
        pytest.skip(f"refused: {error.message}")
    model.load_weights(checkpoint_of(theirs).items())
    ids = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(0))
    trial = ModelTrial(model, context.attention_layers, TorchAttention())
    logits = torch.cat(
        [trial.step({0: ids[:13], 1: ids[5:11]})[0], trial.step({0: ids[13:14]})[0], trial.step({0: ids[14:]})[0]]
    )
    with torch.inference_mode():
        expected = theirs(ids[None], use_cache=False).logits[0].float()
    assert relative_error(logits, expected) < 1e-4
