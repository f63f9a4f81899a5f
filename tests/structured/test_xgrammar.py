"""XGrammar as a grammar engine: beside what the conformance suite asks, what is particular to it."""

from __future__ import annotations

import json
import pickle
import random
from time import thread_time
from typing import Any

import numpy as np
import pytest

from llmkit.errors import InvalidRequestError
from llmkit.frontend.token_vocabulary import TokenVocabulary
from llmkit.grammars.effort import DOOR_S, Effort, TooMuchEffort
from llmkit.hookspecs.structured import Grammar, GrammarRequest
from llmkit.testing.grammar import accepts, allowed, followed, small_vocabulary, tokens_of

pytest.importorskip("xgrammar")

from llmkit_structured.xgrammar_grammar import XGrammarCompiler
from llmkit_structured.xgrammar_source import source_of


@pytest.fixture(scope="module")
def vocabulary() -> TokenVocabulary:
    return small_vocabulary()


@pytest.fixture(scope="module")
def compiler(vocabulary: TokenVocabulary) -> XGrammarCompiler:
    return XGrammarCompiler(vocabulary)


def started(compiler: XGrammarCompiler, kind: Any, source: Any) -> Grammar:
    text = source if isinstance(source, str) else json.dumps(source)
    request = GrammarRequest(kind, text)
    assert compiler.problems(request) == []
    return compiler.load(request, compiler.compile(request)).start()


def test_what_is_compiled_here_is_loaded_there(vocabulary: TokenVocabulary) -> None:
    """Two compilers that know nothing of each other, as in two processes."""
    request = GrammarRequest("choice", '["yes", "no"]')
    data = XGrammarCompiler(vocabulary).compile(request)
    other = XGrammarCompiler(pickle.loads(pickle.dumps(vocabulary)))
    grammar = other.load(request, data).start()
    assert accepts(grammar, tokens_of("yes", vocabulary))


@pytest.mark.parametrize("width", [0, 1, 40])
def test_only_text_is_ever_allowed(width: int) -> None:
    """The library sets bits of its own: of the end, of unused ids, beyond the vocabulary; none if all is allowed."""
    vocabulary = small_vocabulary(width)
    text = {i for i, token in enumerate(vocabulary.tokens) if token}
    for kind, source in (("regex", r"[\s\S]*"), ("choice", ["", "yes"]), ("grammar", 'root ::= "a"?')):
        grammar = started(XGrammarCompiler(vocabulary), kind, source)
        assert allowed(grammar, vocabulary) <= text
        assert not grammar.accept(vocabulary.stop_token_id)
        assert grammar.is_accepting()


def test_without_an_end_token_some_other_id_plays_its_part() -> None:
    vocabulary = TokenVocabulary((b"a", b"b", b"ab"), frozenset(), frozenset())
    grammar = started(XGrammarCompiler(vocabulary), "regex", "(a|b)*")
    assert allowed(grammar, vocabulary) == {0, 1}  # the last id is given up for it
    assert grammar.accept(0)
    assert not grammar.accept(2)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" tail\ntail ::= "b" | "c" tail',
        'start: "a" tail\ntail: "b" | "c" tail',
        'start: A TAIL\nA: "a"\nTAIL: /c*b/',
    ],
)
def test_ebnf_and_lark(compiler: XGrammarCompiler, vocabulary: TokenVocabulary, grammar: str) -> None:
    assert accepts(started(compiler, "grammar", grammar), tokens_of("accb", vocabulary))
    assert not accepts(started(compiler, "grammar", grammar), tokens_of("acc", vocabulary))


@pytest.mark.parametrize(
    "source", ["root ::= nowhere", "root ::= (", 'other ::= "a"', "start: nowhere", "nonsense", 'start: "a']
)
def test_a_bad_grammar_is_refused_with_the_librarys_reason(compiler: XGrammarCompiler, source: str) -> None:
    request = GrammarRequest("grammar", source)
    assert compiler.problems(request) == []  # only the library can tell
    with pytest.raises(InvalidRequestError, match="xgrammar refuses the grammar: ") as raised:
        compiler.compile(request)
    assert ".cc:" not in str(raised.value)
    assert raised.value.param == "structured_outputs"


@pytest.mark.parametrize("code", [r"\ud800", r"\uDFFF", r"\ud83d\ude00", r"\U0000d800", r"\U00110000", r"\\\udabc"])
def test_codes_that_are_no_characters_are_named(compiler: XGrammarCompiler, code: str) -> None:
    """The library would write their bytes, which are no text."""
    grammar = f'root ::= "{code}"'
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": grammar}}
    for request in (GrammarRequest("grammar", grammar), GrammarRequest("structural_tag", json.dumps(tag))):
        [problem] = compiler.problems(request)
        assert "which is no character" in problem


@pytest.mark.parametrize(
    ("code", "text"), [(r"\u00e9", "é"), (r"\U0001f600", "😀"), (r"\\ud800", r"\ud800"), (r"\uffff", "\uffff")]
)
def test_codes_of_characters_are_theirs(
    compiler: XGrammarCompiler, vocabulary: TokenVocabulary, code: str, text: str
) -> None:
    assert accepts(started(compiler, "grammar", f'root ::= "{code}"'), tokens_of(text, vocabulary))


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}

SOMEBODY = {"type": "json_schema", "json_schema": PERSON}


@pytest.mark.parametrize(
    "tag",
    [
        {"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]},
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<f"],
                "tags": [
                    {
                        "type": "tag",
                        "begin": "<f>",
                        "content": {"type": "json_schema", "json_schema": PERSON},
                        "end": "</f>",
                    }
                ],
            },
        },
    ],
)
def test_structural_tags(compiler: XGrammarCompiler, vocabulary: TokenVocabulary, tag: Any) -> None:
    for text, right in (
        ("", True),
        ("free text", True),
        ('say <f>{"n":1}</f> and <f>{"n": 2}</f>.', True),
        ('<f>{"n":1.5}</f>', False),
        ("<f>free</f>", False),
        ('<f>{"n":1}', False),
    ):
        assert accepts(started(compiler, "structural_tag", tag), tokens_of(text, vocabulary)) is right, text


def test_formats_within_formats(compiler: XGrammarCompiler, vocabulary: TokenVocabulary) -> None:
    tag = {
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "a"},
                {"type": "or", "elements": [{"type": "regex", "pattern": "[0-9]+"}, SOMEBODY]},
                {"type": "optional", "content": {"type": "grammar", "grammar": 'root ::= "z"'}},
            ],
        }
    }  # fmt: skip
    grammar = lambda: started(compiler, "structural_tag", tag)  # noqa: E731
    assert all(accepts(grammar(), tokens_of(text, vocabulary)) for text in ("a12", 'a{"n":3}z', "a0z"))
    assert not any(accepts(grammar(), tokens_of(text, vocabulary)) for text in ("a", "az", "a{}"))


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ([], "must be an object"),
        ({}, "structures"),
        ({"format": 3}, "the format None is not supported"),
        ({"format": {"type": "token", "token": 3}}, "the format 'token' is not supported"),
        ({"format": {"type": "json_schema", "json_schema": {"uniqueItems": True}}}, "uniqueItems"),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "the style 'qwen_xml'"),
        ({"format": {**SOMEBODY, "any_order": True}}, "'any_order' in a format json_schema"),
        ({"format": {"type": "regex", "pattern": "(?=a)"}}, "look-ahead"),
        ({"format": {"type": "regex"}}, "needs a text `pattern`"),
        ({"format": {"type": "tag", "begin": {"token": 3}, "content": {}, "end": ""}}, "begin must be a text"),
        ({"format": {"type": "any_text", "max_tokens": 3}}, "'max_tokens' in a format any_text"),
    ],
)  # fmt: skip
def test_what_of_a_structural_tag_is_not_enforced_is_named(compiler: XGrammarCompiler, tag: Any, reason: str) -> None:
    (problem,) = compiler.problems(GrammarRequest("structural_tag", json.dumps(tag)))
    assert reason in problem


def test_the_librarys_own_reading_of_schemas_is_not_used() -> None:
    """It would let these pass: a limit beside a pattern, a bound beside multipleOf, tabs in strings."""
    schema = {"type": "string", "pattern": "^[ab]+$", "maxLength": 3}
    source = source_of(GrammarRequest("json_schema", json.dumps(schema)))
    assert source.notation == "ebnf"
    assert "maxLength" not in source.text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "number"}}, "required": ["s"]},
        {"type": "array", "items": {"anyOf": [{"type": "string", "minLength": 2, "maxLength": 5}, {"type": "null"}]}},
        {
            "type": "object",
            "additionalProperties": {"type": "integer", "minimum": -3, "maximum": 40},
            "minProperties": 1,
        },
    ],
)
def test_wherever_the_masks_lead_the_schema_is_met(
    compiler: XGrammarCompiler, vocabulary: TokenVocabulary, schema: Any
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    ended = 0
    for seed in range(25):
        text = followed(started(compiler, "json_schema", schema), vocabulary, random.Random(seed), max_tokens=120)
        if text is not None:
            jsonschema.validate(json.loads(text), schema)
            ended += 1
    assert ended > 5


def test_states_of_one_grammar_are_apart(compiler: XGrammarCompiler, vocabulary: TokenVocabulary) -> None:
    request = GrammarRequest("regex", "abc|xyz")
    compiled = compiler.load(request, compiler.compile(request))
    one, two = compiled.start(), compiled.start()
    assert one.accept(ord("x"))
    assert allowed(two, vocabulary) >= {ord("a"), ord("x")}
    assert one.validate(tokens_of("yzz", vocabulary)) == 2
    assert one.accept(ord("y"))
    one.rollback(2)
    assert allowed(one, vocabulary) == allowed(two, vocabulary)
    row = np.full(vocabulary.num_words, -1, dtype=np.int32)
    one.fill_bitmask(row)
    assert row[-1] == 0 or vocabulary.vocab_size % 32 != 0


def test_what_is_released_is_gone_and_a_state_that_is_left_goes_on(
    compiler: XGrammarCompiler, vocabulary: TokenVocabulary
) -> None:
    request = GrammarRequest("choice", '["yes", "no"]')
    compiled = compiler.load(request, compiler.compile(request))
    state = compiled.start()
    compiled.release()
    assert accepts(state, tokens_of("yes", vocabulary))
    with pytest.raises(AttributeError):
        compiled.start()


def test_what_was_compiled_is_loaded_here_without_being_compiled_again(
    vocabulary: TokenVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compile process tries what it has compiled: an enum of 20 000 took it twice as long, and met its limit."""
    compiler = XGrammarCompiler(vocabulary)
    compiled = []
    once = compiler._compiled
    monkeypatch.setattr(compiler, "_compiled", lambda source: compiled.append(source) or once(source))
    requests = [GrammarRequest("choice", json.dumps([text])) for text in ("yes", "no")]
    data = [compiler.compile(request) for request in requests]
    for request, one, word in zip(requests[::-1], data[::-1], ("no", "yes"), strict=True):
        assert accepts(compiler.load(request, one).start(), tokens_of(word, vocabulary))
    assert [source.text.split()[-1] for source in compiled] == ['"yes"', '"no"', '"yes"']


def test_writing_a_grammar_costs_no_more_than_there_is_to_spend() -> None:
    """A tree of all names but these: three times that, in 3400 characters."""
    schema = json.dumps({"type": "object", "required": [f"p{i}" for i in range(500)]})
    start = thread_time()
    with pytest.raises(TooMuchEffort), Effort(DOOR_S / 4).limited():
        source_of(GrammarRequest("json_schema", schema))
    assert thread_time() - start < 3 * DOOR_S
