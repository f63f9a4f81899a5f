"""Kind `model`: an architecture, looked up by the name in `config.json`'s `architectures`.

A plugin is called by the architecture that it implements. One that serves many says in `llmkit_model_support` which:
it is asked about models of architectures that no plugin is called by, and where the configuration names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmkit.hookspecs.markers import hookspec

if TYPE_CHECKING:
    from pydantic import BaseModel

    from llmkit.hookspecs.attention import Support
    from llmkit.layers.causal_lm import CausalLM
    from llmkit.layers.context import ModelContext


@hookspec(firstresult=True)
def llmkit_model(context: ModelContext, options: BaseModel | None) -> CausalLM:  # type: ignore[empty-body]
    """Build the model without weights (parameters are filled by `load_weights`).

    `context` carries the configuration, dtype, device, kernels, quantization and the parallel layout; layers from
    `llmkit.layers` take it as their first argument. `options` is an instance of `info.options`, validated; None if
    there is none.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def llmkit_model_support(config: Mapping[str, Any]) -> Support:  # type: ignore[empty-body]
    """Whether and how well the plugin serves the model with this `config.json`, whatever its architecture is called.

    Only for plugins that are not called by one architecture. Of those that give no reasons against it, the one with
    the highest score is taken, then the one with the highest rank. Must not run code that comes with a model.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def llmkit_model_config(config: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[empty-body]
    """The configuration under the keys that the core reads, see `DecoderConfig`; `config` is the model's own.

    Only for plugins whose architectures call them otherwise. The result is what `context.config.raw` holds, so what
    the plugin itself needs must be in it, too.

    .. versionadded:: 0.1
    """


@hookspec(firstresult=True)
def llmkit_model_example() -> dict[str, Any]:  # type: ignore[empty-body]
    """The `config.json` of a small model that the plugin serves: a few layers, a vocabulary of about a hundred.

    Optional; conformance tests run it. It should have whatever is particular to the architecture, in small: a sliding
    window of a few tokens, experts. Without it a configuration class of transformers is shrunk.

    .. versionadded:: 0.1
    """
