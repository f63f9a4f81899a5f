"""An exception that a plugin's object raises while the engine starts names the plugin."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from llmkit import LLM
from llmkit.errors import ModelError, PluginError
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.registry import Registry
from llmkit_attention.torch_backend import TorchAttention

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class Backend(TorchAttention):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def page_sizes(self):
        raise self.error


def start(error):
    @hookimpl
    def llmkit_attention_backend():
        return Backend(error)

    registry = Registry.discover()
    door = SimpleNamespace(info=PluginInfo("for a test"), llmkit_attention_backend=llmkit_attention_backend)
    door.__module__, door.__qualname__ = __name__, "door"
    registry.register("attention", "broken", door)
    LLM(load_format="dummy", overrides=TINY, num_blocks=8, attention="broken", registry=registry)


@pytest.mark.parametrize("error", [RuntimeError("no pages"), StopIteration("no pages"), SystemExit("no pages")])
def test_the_plugin_is_named(error):
    with pytest.raises(PluginError, match=r"attention plugin 'broken' .* failed while the engine started: .*no pages"):
        start(error)


@pytest.mark.parametrize("error", [ModelError("on purpose"), KeyboardInterrupt()])
def test_errors_on_purpose_and_interrupts_pass(error):
    with pytest.raises(type(error)) as caught:
        start(error)
    assert caught.value is error
