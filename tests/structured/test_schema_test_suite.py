"""JSON Schema's official test-suite: no engine is wrong about it. benchmarks/json_schema_suite.py prints the shares."""

from __future__ import annotations

import json
import os

import pytest

from llmkit.errors import ModelError
from llmkit.hookspecs.structured import CompiledGrammar, GrammarCompiler, GrammarRequest
from llmkit.registry import Registry
from llmkit.testing.grammar import small_vocabulary
from llmkit.testing.schema_test_suite import NARROWER, Group, explanation, judge, load

DEEP = bool(os.environ.get("LLMKIT_DEEP_TESTS"))
QUICK = ("const.json", "enum.json", "maxLength.json", "minItems.json", "pattern.json", "optional/format/date.json")
LEAST_ACCEPTED = {"xgrammar": 253, "guidance": 250, "outlines": 249, "lm-format-enforcer": 163}
VOCABULARY = small_vocabulary()


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    try:
        return load()
    except ModelError as error:
        pytest.skip(str(error))


def compiler_of(engine: str) -> GrammarCompiler:
    registry = Registry.discover()
    compiler: GrammarCompiler = registry.build(registry.load("structured", engine), {"vocabulary": VOCABULARY})
    return compiler


@pytest.mark.parametrize("engine", LEAST_ACCEPTED)
def test_no_engine_is_wrong(engine: str, groups: list[Group]) -> None:
    everything = DEEP or engine in ("guidance", "xgrammar")
    chosen = groups if everything else [group for group in groups if group.file in QUICK]
    report = judge(compiler_of(engine), VOCABULARY, chosen)
    assert report.wrong == []
    assert report.accepted >= (LEAST_ACCEPTED[engine] if everything else 15)
    assert all(reason for reason in report.refused)
    assert all(cause in NARROWER for causes in report.narrower for cause in causes.split(" + "))


class Careless(GrammarCompiler):
    """Passes over uniqueItems, and takes no more than two items."""

    def __init__(self, inner: GrammarCompiler) -> None:
        self._inner = inner

    def problems(self, request: GrammarRequest) -> list[str]:
        return self._inner.problems(self._changed(request))

    def compile(self, request: GrammarRequest) -> bytes:
        return self._inner.compile(self._changed(request))

    def load(self, request: GrammarRequest, compiled: bytes) -> CompiledGrammar:
        return self._inner.load(self._changed(request), compiled)

    def _changed(self, request: GrammarRequest) -> GrammarRequest:
        schema = {**json.loads(request.source), "uniqueItems": False, "maxItems": 2}
        return GrammarRequest(request.kind, json.dumps(schema))


def test_an_engine_that_allows_too_much_or_too_little_is_wrong(groups: list[Group]) -> None:
    chosen = [group for group in groups if group.file == "uniqueItems.json"][:1]
    report = judge(Careless(compiler_of("guidance")), VOCABULARY, chosen)
    assert any("non-unique array of integers is invalid: [1,1] is accepted" in sentence for sentence in report.wrong)
    assert any("is rejected and must not be" in sentence for sentence in report.wrong)


@pytest.mark.parametrize(
    ("schema", "value", "accepted", "cause"),
    [
        ({"type": "integer"}, 1.0, ["1"], 0),
        ({"properties": {"a": {}}}, {"a": 1, "b": 2}, ['{"a":1}', '{"a": 1}'], 1),
        ({"properties": {"a": {}, "b": {}}}, {"b": 2, "a": 1}, ['{"a":1,"b":2}', '{"a": 1, "b": 2}'], 2),
        ({}, [[[[1]]]], [], 3),
        ({"format": "email"}, "no address", [], 4),
        ({"type": "integer"}, 1, [], None),
        ({"additionalProperties": True, "properties": {"a": {}}}, {"b": 1}, ["{}"], None),
    ],
)
def test_narrower_has_a_cause_that_is_tried_out(
    schema: object, value: object, accepted: list[str], cause: int | None
) -> None:
    expected = None if cause is None else NARROWER[cause]
    assert explanation(schema, value, accepted.__contains__) == expected
