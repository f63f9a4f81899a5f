"""llguidance as a grammar engine: beside what the conformance suite asks, what is particular to it."""

from __future__ import annotations

import json

import pytest

from llmkit.errors import InvalidRequestError
from llmkit.hookspecs.structured import GrammarRequest
from llmkit.testing.grammar import accepts, small_vocabulary, tokens_of

pytest.importorskip("llguidance")

from llmkit_structured.guidance import GuidanceOptions
from llmkit_structured.guidance_grammar import GuidanceCompiler


def test_what_exceeds_a_limit_of_the_library_is_to_blame_itself() -> None:
    vocabulary = small_vocabulary()
    compiler = GuidanceCompiler(vocabulary, GuidanceOptions())
    objects = [{"type": "object", "properties": {f"k{i}": {"type": "string", "minLength": 1}}} for i in range(1000)]
    request = GrammarRequest("json_schema", json.dumps({"anyOf": objects}))
    grammar = compiler.load(request, compiler.compile(request)).start()
    with pytest.raises(InvalidRequestError, match=r"given up on the grammar: .* max is 2000"):
        accepts(grammar, tokens_of('{"k1": "', vocabulary))


def test_so_is_what_exceeds_a_limit_of_its_lexer() -> None:
    """Whose message is written in another way."""
    vocabulary = small_vocabulary()
    compiler = GuidanceCompiler(vocabulary, GuidanceOptions())
    request = GrammarRequest("regex", "a?" * 400 + "a" * 400)
    with pytest.raises(InvalidRequestError, match="too many expressions"):
        accepts(compiler.load(request, compiler.compile(request)).start(), tokens_of("a" * 500, vocabulary))
