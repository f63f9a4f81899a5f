"""Kind `model`: an architecture, looked up by the name in `config.json`'s `architectures`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.layers.context import ModelContext


@hookspec(firstresult=True)
def llmkit_model(context: ModelContext) -> CausalLM:  # type: ignore[empty-body]
    """Build the model without weights (parameters are filled by `load_weights`).

    `context` carries the configuration, dtype, device, kernels, quantization and the parallel layout; layers from
    `llmkit.layers` take it as their first argument.

    .. versionadded:: 0.1
    """
