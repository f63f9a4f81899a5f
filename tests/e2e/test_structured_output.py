"""Structured output with the real model: the field's cases, as far as they need no server."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmkit import LLM, AsyncLLM, RequestOutput, SamplingParams
from llmkit.errors import InvalidRequestError

pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")

FAMILY, PEPPER = "👨‍👩‍👧", "🌶"
NAME = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}},
    "required": ["name"],
}
PROMPT = "A person, as JSON: "


deep = pytest.mark.skipif(not os.environ.get("LLMKIT_DEEP_TESTS"), reason="takes seconds of processor time")


def ask(llm: LLM, constraint: dict[str, Any], prompt: str = PROMPT, **params: Any) -> RequestOutput:
    defaults: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
    return llm.generate(prompt, SamplingParams(structured_outputs=constraint, **defaults | params))[0]


def text_of(output: RequestOutput) -> str:
    assert output.error is None
    assert output.outputs[0].finish_reason == "stop"
    return output.outputs[0].text


def streamed(llm: LLM, constraint: dict[str, Any], **params: Any) -> list[str]:
    chosen = SamplingParams(structured_outputs=constraint, temperature=0, **params)
    return [output.outputs[0].text for output in llm.stream(PROMPT, chosen)]


# B02, B10, B12: choices, characters of several tokens


def test_a_character_of_many_tokens_is_streamed_whole(llm: LLM) -> None:
    deltas = streamed(llm, {"choice": [FAMILY]}, max_tokens=20)
    assert "".join(deltas) == FAMILY == text_of(ask(llm, {"choice": [FAMILY]}))
    assert not any("�" in delta for delta in deltas)


def test_cut_within_a_character(llm: LLM) -> None:
    whole = ask(llm, {"choice": [PEPPER]}, max_tokens=2)
    assert (whole.outputs[0].finish_reason, len(whole.outputs[0].token_ids)) == ("length", 2)
    assert whole.outputs[0].text == "".join(streamed(llm, {"choice": [PEPPER]}, max_tokens=2)) == ""


def test_log_probabilities_of_what_is_left(llm: LLM) -> None:
    output = ask(llm, {"choice": [PEPPER]}, logprobs=3)
    entries = output.outputs[0].logprobs
    assert entries is not None
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    assert [tokenizer.token_bytes(entry.token_ids[0]) for entry in entries] == [b"\xf0\x9f", b"\x8c", b"\xb6"]
    assert all(math.isfinite(entry.logprobs[0]) for entry in entries)
    assert all(entry.logprobs[0] <= 0 for entry in entries)


def test_an_abandoned_stream_leaves_nothing(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(structured_outputs={"choice": [PEPPER]}, temperature=0, max_tokens=9))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    core = llm.engine.core
    assert not core.has_work()
    assert core.scheduler.manager.num_free_blocks == core.scheduler.manager.num_blocks


# B52, B54: blanks, ends


BETWEEN = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}


@pytest.mark.parametrize("schema", [{"type": "array", "maxItems": 0}, BETWEEN])
def test_blanks_have_an_end(llm: LLM, schema: dict[str, Any]) -> None:
    text = text_of(ask(llm, {"json": schema}, max_tokens=200, logit_bias={198: 100.0, 216: 100.0}))
    jsonschema.validate(json.loads(text), schema)
    assert max(map(len, re.findall(r"\s+", text))) == llm.config.structured.max_whitespace


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"logit_bias": {2: 100.0, 0: 100.0}, "stop_token_ids": [30]},
        {"ignore_eos": True},
        {"min_tokens": 40},
        {"include_stop_str_in_output": True, "logit_bias": {2: 100.0}},
        {"temperature": 1.3, "seed": 11, "top_p": 0.9},
        pytest.param({"frequency_penalty": 1.5, "repetition_penalty": 1.3, "bad_words": ["John"]}, marks=deep),
    ],
)
def test_the_answer_is_whole_and_ends_at_its_end(llm: LLM, params: dict[str, Any]) -> None:
    text = text_of(ask(llm, {"json": NAME}, **params))
    jsonschema.validate(json.loads(text), NAME)
    assert text[-1] == "}"


def test_a_model_with_several_end_tokens(smollm2_gguf: Path, make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(smollm2_gguf, **{"model.overrides": {"eos_token_id": [2, 30]}})
    text = text_of(ask(llm, {"json": NAME}, logit_bias={30: 100.0, 2: 100.0}))
    jsonschema.validate(json.loads(text), NAME)


def test_stop_strings_cut_wherever_they_are(llm: LLM) -> None:
    output = ask(llm, {"json": NAME}, stop=['name"'])
    assert output.outputs[0].stop_reason == 'name"'
    assert "name" not in output.outputs[0].text


def test_forks_and_company(llm: LLM) -> None:
    """Sequences of one request, seeded, and another request beside them: each as it is alone."""
    params = SamplingParams(n=3, seed=5, temperature=1.2, max_tokens=60, structured_outputs={"json": NAME})
    plain = SamplingParams(temperature=0, max_tokens=12)
    together = llm.generate([PROMPT, "Counting: one, two, three, four, five,"], [params, plain])
    alone = llm.generate(PROMPT, params)[0]
    texts = [completion.text for completion in together[0].outputs]
    assert texts == [completion.text for completion in alone.outputs]
    assert len(set(texts)) > 1
    for text in texts:
        jsonschema.validate(json.loads(text), NAME)
    assert together[1].outputs[0].text.startswith(" six, seven")


# B26, B50, B56: what is refused, and what must hold


@pytest.mark.parametrize(
    ("constraint", "named"),
    [
        ({"json": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"type": "object", "patternProperties": {"^S_": {"type": "string"}}}}, "patternProperties"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "no value"),
        ({"json": {"type": "strin"}}, "type at #"),
        ({"json": {"enum": ["\U00040000"]}}, "no token for"),
        ({"choice": ["\U00040000"]}, "no token for"),
        ({"regex": "(?=a)"}, "look-ahead"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(llm: LLM, constraint: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(named)) as raised:
        ask(llm, constraint)
    assert raised.value.param == "structured_outputs"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["a"]},
        {"type": "integer", "multipleOf": 7},
        {"type": "string", "pattern": "^[ab]+$", "maxLength": 3},
        {"type": "array", "minItems": 2},
        {"const": "x", "type": "string"},
        pytest.param({"not": {"type": "string"}}, marks=deep),
        pytest.param({"type": "object", "additionalProperties": False}, marks=deep),
        pytest.param({"type": "integer", "maximum": 20_000_000_000}, marks=deep),
        pytest.param({"type": "integer", "maximum": 1e30}, marks=deep),
    ],
)
def test_every_keyword_holds_or_the_request_is_refused(llm: LLM, schema: dict[str, Any]) -> None:
    output = ask(llm, {"json": schema}, "JSON: ", max_tokens=20, temperature=0.9, seed=3)
    if output.outputs[0].finish_reason == "stop":
        jsonschema.validate(json.loads(output.outputs[0].text), schema)
    else:
        assert output.outputs[0].finish_reason == "length"


def test_a_bad_grammar_fails_its_request_alone(llm: LLM, facts: Any) -> None:
    bad = SamplingParams(structured_outputs={"grammar": "root ::= nowhere"})
    good = SamplingParams(temperature=0, max_tokens=12)
    first, second = llm.generate([facts.g1, facts.g1], [bad, good])
    assert first.outputs[0].finish_reason == "error"
    assert "xgrammar refuses" in str(first.error)
    assert first.error_param == "structured_outputs"
    assert second.outputs[0].token_ids == facts.g1_ids


# B48: what takes long to compile


def alternatives(depth: int) -> Any:
    """Pairs within one another, of which both may hold."""
    if depth == 0:
        return {"minimum": 0}
    return {"oneOf": [{"properties": {name: alternatives(depth - 1)}} for name in ("a", "b")]}


EXPLOSIVE: dict[str, Any] = {
    "alternatives": alternatives(12),
    "pattern": {"type": "string", "pattern": "(a{1,500}){1,500}"},
    "maxLength": {"type": "string", "maxLength": 1_000_000},
    "properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3_000)}},
    "enum": {"enum": [f"value number {i}" for i in range(20_000)]},
}
LEAST_TOKENS_A_SECOND = 1.0
"""Of a stream beside it, where twenty and more are usual: far enough from these for a machine that is busy and for one
full collection of the tests' own objects, and from none at all, as when steps wait for the compilation."""


@pytest.mark.parametrize(
    "name",
    ["alternatives", "pattern", "maxLength", *(pytest.param(name, marks=deep) for name in ("properties", "enum"))],
)
def test_a_stream_goes_on_while_a_huge_schema_is_compiled(llm: LLM, name: str) -> None:
    """Or refused: what would multiply without end is, in the compile process. The stream ends first where the machine
    has little time for that, which goes last."""
    ask(llm, {"choice": ["yes"]})  # the compile process is there
    outcomes: list[str | None] = []

    def ask_for_it() -> None:
        try:
            answer = ask(llm, {"json": EXPLOSIVE[name]}, "JSON: ", max_tokens=3)
            outcomes.append(answer.error or answer.outputs[0].finish_reason)
        except InvalidRequestError as refusal:
            outcomes.append(refusal.message)

    asking = threading.Thread(target=ask_for_it)
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=200, ignore_eos=True, temperature=0))
    next(stream)
    asking.start()
    num_tokens, start = 0, time.perf_counter()
    for _ in stream:
        num_tokens += 1
        if not asking.is_alive():
            break
    elapsed = time.perf_counter() - start
    stream.close()  # type: ignore[attr-defined]
    asking.join()
    [outcome] = outcomes
    if name == "alternatives":
        assert "multiply to too many" in str(outcome)
    else:
        assert outcome in ("length", "stop") or "too" in str(outcome)
    assert num_tokens >= LEAST_TOKENS_A_SECOND * elapsed, (num_tokens, elapsed)


@deep
def test_the_first_grammar_of_a_server_imports_nothing(smollm2_gguf: Path, settings: dict[str, Any]) -> None:
    """Its engine has the library before it takes requests, and the process that compiles is there: beside a stream
    nothing is left but to compile and to load. What it costs is measured by benchmarks/structured_output.py."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}

    async def main() -> None:
        async with AsyncLLM(smollm2_gguf, preload_grammars=True, **settings) as llm:
            engine = Path(f"/proc/{llm._loop.client.pid}")  # type: ignore[attr-defined]
            libraries = engine.joinpath("maps").read_text()
            assert "xgrammar" in libraries
            children = [path.read_text() for path in engine.glob("task/*/children")]
            assert len(" ".join(children).split()) == 1
            params = SamplingParams(temperature=0, max_tokens=40, structured_outputs={"json": schema})
            outputs = [output async for output in llm.generate("A number, as JSON: ", params)]
            assert json.loads(outputs[-1].outputs[0].text)["n"] <= 9
            mapped = {line.split()[-1] for line in engine.joinpath("maps").read_text().splitlines() if ".so" in line}
            assert all(name in libraries for name in mapped)

    asyncio.run(main())
