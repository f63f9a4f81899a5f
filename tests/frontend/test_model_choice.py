"""Which plugin runs a model: called by its architecture, named by the user, or the best that serves anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from llmkit.config import EngineConfig
from llmkit.config.sections import ModelConfig, PluginsConfig
from llmkit.errors import ModelError, PluginError
from llmkit.frontend.model_choice import ModelChoice, choose_model_plugin
from llmkit.frontend.model_source import resolve_model
from llmkit.hookspecs import Environment, PluginInfo, hookimpl
from llmkit.hookspecs.attention import Support
from llmkit.registry import Registry


def serves(
    score: int = 0, rank: int = 0, reasons: tuple[str, ...] = (), problems: tuple[str, ...] = (), auto: bool = True
) -> Any:
    """Front door of a model plugin that serves any architecture, or says why not."""

    class Anything:
        info = PluginInfo("serves anything", rank=rank, auto=auto)
        asked: list[Mapping[str, Any]] = []  # noqa: RUF012

        @staticmethod
        @hookimpl
        def llmkit_problems(environment: Environment) -> list[str]:  # noqa: ARG004
            return list(problems)

        @staticmethod
        @hookimpl
        def llmkit_model_support(config: Mapping[str, Any]) -> Support:
            Anything.asked.append(config)
            return Support(score, reasons)

        @staticmethod
        @hookimpl
        def llmkit_model_config(config: Mapping[str, Any]) -> dict[str, Any]:
            return {"vocab_size": config["n_vocab"], "max_position_embeddings": 8, "own": dict(config)}

        @staticmethod
        @hookimpl
        def llmkit_model(context: Any) -> Any:
            raise NotImplementedError

    return Anything


@pytest.fixture
def registry() -> Registry:
    """Without llmkit's own plugin that serves anything; what is registered from Python takes part in auto."""
    return Registry.discover(PluginsConfig(disable=["model:transformers"], auto="any"))


def choose(registry: Registry, choice: str = "auto", *architectures: str, **keys: Any) -> ModelChoice:
    config = {"architectures": list(architectures or ("Odd",)), **keys}
    return choose_model_plugin(choice, config, registry, Environment(), "the model")


def test_the_plugin_called_by_the_architecture_comes_first(registry: Registry) -> None:
    anything = serves(score=100)
    registry.register("model", "anything", anything)
    chosen = choose(registry, "auto", "Odd", "LlamaForCausalLM", "Qwen2ForCausalLM")
    assert (chosen.architecture, chosen.plugin) == ("LlamaForCausalLM", "LlamaForCausalLM")
    assert anything.asked == []


def test_else_the_best_of_those_that_serve_it(registry: Registry) -> None:
    for name, door in {
        "low": serves(),
        "high": serves(rank=3),
        "scored": serves(score=1, rank=-5),
        "best": serves(score=9, reasons=("it cannot",)),
        "missing": serves(score=9, problems=("it misses a library",)),
        "shy": serves(score=9, auto=False),
    }.items():
        registry.register("model", name, door)
    chosen = choose(registry, "auto", "Odd", "Odder")
    assert chosen == ModelChoice("Odd", "scored", "no plugin is called Odd or Odder, and it serves that")
    registry.unregister("model", "scored")
    assert choose(registry).plugin == "high"


def test_none_serves_it_and_each_says_why(registry: Registry) -> None:
    registry.register("model", "anything", serves(reasons=("it has no attention", "it is too odd")))
    registry.register("model", "other", serves(problems=("it misses a library.",)))
    with pytest.raises(ModelError) as caught:
        choose(registry, auto_map={"AutoModel": "x.Y"})
    for part in (
        "No model plugin is for the architecture Odd of the model",
        "(auto_map) is never run",
        "The plugin anything does not serve it: it has no attention; it is too odd.",
        "The plugin other does not serve it: it misses a library.",
        "Known architectures: Gemma3ForCausalLM",
    ):
        assert part in str(caught.value)


def test_a_plugin_that_is_named(registry: Registry) -> None:
    anything = serves()
    registry.register("model", "anything", anything)
    registry.register("model", "unwilling", serves(reasons=("it is too odd",)))
    chosen = choose(registry, "anything", "LlamaForCausalLM")
    assert chosen == ModelChoice("LlamaForCausalLM", "anything", "named in the configuration")
    assert choose(registry, "MistralForCausalLM", "LlamaForCausalLM").plugin == "MistralForCausalLM"
    with pytest.raises(PluginError, match=r"'unwilling'.*it is too odd"):
        choose(registry, "unwilling")
    with pytest.raises(PluginError, match="There is no model plugin 'nobody'"):
        choose(registry, "nobody")


def test_an_architecture_that_was_disabled_is_served_by_another_or_said_to_be() -> None:
    registry = Registry.discover(PluginsConfig(disable=["model:transformers", "model:LlamaForCausalLM"], auto="any"))
    with pytest.raises(ModelError, match=r"'LlamaForCausalLM'.*it is disabled by"):
        choose(registry, "auto", "LlamaForCausalLM")
    registry.register("model", "anything", serves())
    assert choose(registry, "auto", "LlamaForCausalLM").plugin == "anything"


@pytest.mark.parametrize("answer", ["yes", RuntimeError("broken")])
def test_a_plugin_that_fails_when_asked(registry: Registry, answer: object) -> None:
    class Failing(serves()):  # type: ignore[misc]
        @staticmethod
        @hookimpl
        def llmkit_model_support(config: Mapping[str, Any]) -> Any:  # noqa: ARG004
            if isinstance(answer, Exception):
                raise answer
            return answer

    registry.register("model", "failing", Failing)
    with pytest.raises(PluginError, match=r"'failing'.*(returned a str where a Support|RuntimeError: broken)"):
        choose(registry)


def test_the_plugin_translates_the_configuration(registry: Registry) -> None:
    registry.register("model", "anything", serves())
    keys = {"architectures": ["Odd"], "n_vocab": 11}
    source = resolve_model(EngineConfig(model=ModelConfig(load_format="dummy", overrides=keys)), registry)
    assert (source.architecture, source.plugin) == ("Odd", "anything")
    assert source.config == {"vocab_size": 11, "max_position_embeddings": 8, "own": keys}
    assert source.file_config == keys
    seen: list[Any] = []
    source.format.tensors = lambda path, config: seen.append((path, config)) or iter(())  # type: ignore[method-assign, func-returns-value]
    assert list(source.tensors()) == []
    assert seen == [(source.path, keys)]
