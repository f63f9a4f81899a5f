"""Which formats are taken: named, or by the chat template, or none."""

from __future__ import annotations

from typing import Any

import pytest

from llmkit.answers.formats import no_tool_format, reasoning_format, tool_format
from llmkit.config import EngineConfig
from llmkit.errors import PluginError
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.registry import Registry, detect_environment

CPU = detect_environment("cpu")

# What the templates of the families hold, as it stands in their Jinja source.
TOOL_TEMPLATES = {
    "hermes": r"""{{- "\n</tools>\n\nreturn a json object:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>" }}""",  # noqa: E501
    "llama3-json": r"""{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}""",  # noqa: E501
    "mistral": """{{- "[TOOL_CALLS] [" }}""",
    "pythonic": """you should return in the format [func_name1(params_name1=params_value1, params_name2=params_value2...)]""",  # noqa: E501
    "qwen": r"""'<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n'""",
}
REASONING_TEMPLATES = {
    "deepseek-r1": "{{ content.split('</think>')[-1] }}{{'<｜Assistant｜><think>\\n'}}",
    "qwen3": "{{- '<|im_start|>assistant\\n' }}{{- '<think>\\n\\n</think>\\n\\n' }}",
}
OTHERS = (
    None,
    "",
    "{% for message in messages %}{{ message.content }}{% endfor %}",
    "<|im_start|>{{ role }}",
    "<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key>",
)


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_a_template_tells_its_tool_format(name: str) -> None:
    registry = Registry.discover()
    found = tool_format(registry, "auto", TOOL_TEMPLATES[name], CPU)
    assert found is not None
    chosen = registry.chosen("tool_parser")
    assert (chosen.name, chosen.choice) == (name, "auto")
    assert set(chosen.rejected) == set(TOOL_TEMPLATES) - {name}


@pytest.mark.parametrize("name", REASONING_TEMPLATES)
def test_a_template_tells_its_reasoning_format(name: str) -> None:
    registry = Registry.discover()
    assert reasoning_format(registry, "auto", REASONING_TEMPLATES[name], CPU) is not None
    assert registry.chosen("reasoning_parser").name == name


@pytest.mark.parametrize("template", OTHERS)
def test_other_templates_tell_none(template: str | None) -> None:
    registry = Registry.discover()
    assert tool_format(registry, "auto", template, CPU) is None
    assert reasoning_format(registry, "auto", template, CPU) is None
    assert registry.selections == []


def test_a_template_that_shows_two_formats_tells_none() -> None:
    both = TOOL_TEMPLATES["hermes"] + TOOL_TEMPLATES["mistral"]
    assert tool_format(Registry.discover(), "auto", both, CPU) is None


def test_named_or_none() -> None:
    registry = Registry.discover()
    assert tool_format(registry, "hermes", None, CPU) is not None
    assert tool_format(registry, None, TOOL_TEMPLATES["hermes"], CPU) is None
    with pytest.raises(PluginError, match=r"no tool_parser plugin 'herms'.*hermes"):
        tool_format(registry, "herms", None, CPU)


def test_a_format_that_fails_when_asked_is_passed_over() -> None:
    class Failing:
        info = PluginInfo("fails")

        @staticmethod
        @hookimpl
        def llmkit_tool_format(options: Any) -> Any:
            raise AssertionError(options)

        @staticmethod
        @hookimpl
        def llmkit_tool_format_fits(chat_template: str) -> bool:
            raise RuntimeError(chat_template)

        @staticmethod
        @hookimpl
        def llmkit_reasoning_format(options: Any) -> Any:
            raise AssertionError(options)

        @staticmethod
        @hookimpl
        def llmkit_reasoning_format_fits(chat_template: str) -> bool:
            raise RuntimeError(chat_template)

    plugins = EngineConfig(plugins={"auto": "any"}).plugins
    registry = Registry.discover(plugins)
    for kind, choose, template in (
        ("tool_parser", tool_format, TOOL_TEMPLATES["qwen"]),
        ("reasoning_parser", reasoning_format, REASONING_TEMPLATES["qwen3"]),
    ):
        registry.register(kind, "failing", Failing)
        assert choose(registry, "auto", template, CPU) is not None
        assert "failed" in registry.chosen(kind).rejected["failing"]


def test_the_settings_are_in_the_section_of_the_server() -> None:
    assert EngineConfig().server.tool_parser == EngineConfig().server.reasoning_parser == "auto"
    assert EngineConfig(server={"tool_parser": None}).server.tool_parser is None


def test_tools_without_a_format_are_refused_with_advice() -> None:
    error = no_tool_format(Registry.discover())
    assert error.param == "tools"
    assert "--tool-call-parser" in str(error.hint)
    assert "hermes" in str(error.hint)
