"""Tool calls that a real model is made to write, in every format, and read back."""

from __future__ import annotations

import json

import pytest

from llmkit import LLM, SamplingParams
from llmkit.registry import Registry, detect_environment
from llmkit.testing.answers import read_calls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "London"]}, "days": {"enum": [1, 2, 3]}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "noop"}},
]
MESSAGES = [{"role": "user", "content": "Call get_weather for London and three days."}]


@pytest.mark.parametrize("name", ["hermes", "llama3-json", "mistral", "pythonic", "qwen"])
@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_a_forced_call_is_a_call(llm: LLM, name: str, choice: str) -> None:
    form = Registry.discover().create("tool_parser", name, detect_environment("cpu"))
    constraint = form.constraint(TOOLS, choice, False)
    params = SamplingParams(temperature=0, max_tokens=120, structured_outputs=constraint)
    (output,) = llm.chat(MESSAGES, params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.finish_reason == "stop"
    found = read_calls(form.parser(TOOLS), list(answer.text))
    assert found.content == ""
    ((called, arguments),) = found.calls
    value = json.loads(arguments)
    if called == "noop":
        assert (choice, value) == ("required", {})
    else:
        assert value["city"] in ("Paris", "London")
        assert value["days"] in (1, 2, 3)


def test_reasoning_comes_before_a_constraint(llm: LLM) -> None:
    """SmolLM2 does not reason: it is made to, by a block that the prompt has opened."""
    form = Registry.discover().create("reasoning_parser", "qwen3", detect_environment("cpu"))
    from llmkit.requests.structured_outputs import StructuredOutputs

    prompt = "Is Paris in France?\n<think>\nParis is in France.</think>\n\nyes\nIs London in France?\n<think>\n"
    constraint = form.constraint(StructuredOutputs(choice=("yes", "no")), prompt)
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=constraint)
    answer = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    parser = form.parser(prompt)
    deltas = [parser.feed(answer.text), parser.finish()]
    assert answer.finish_reason == "stop"
    assert "".join(delta.reasoning for delta in deltas)
    assert "".join(delta.content for delta in deltas) in ("yes", "no")
