"""What is asked of a grammar engine: masks that agree with what is accepted and with an independent reading of the
request, states that can be undone, an end where the text is complete and nowhere else. What an engine refuses is not
held against it, as long as it says so."""

from __future__ import annotations

import itertools
import json
import random
import re
from time import perf_counter, process_time
from typing import Any

import numpy as np
import pytest

from llmkit.errors import InvalidRequestError
from llmkit.frontend.token_vocabulary import TokenVocabulary
from llmkit.hookspecs.structured import CompiledGrammar, Grammar, GrammarCompiler, GrammarRequest
from llmkit.testing.conformance import structured_cases as cases
from llmkit.testing.conformance.elsewhere import masks_elsewhere
from llmkit.testing.conformance.target import Conformance
from llmkit.testing.grammar import accepts, allowed, built, followed, parsed, small_vocabulary, tokens_of

NUM_WALKS, WALK_TOKENS = 10, 80
ORDINARY_S = 0.1
_ALPHABET = "abc.é日本"


@pytest.fixture(scope="module")
def vocabulary() -> TokenVocabulary:
    return small_vocabulary()


@pytest.fixture(scope="module")
def compiler(conformance: Conformance, vocabulary: TokenVocabulary) -> GrammarCompiler:
    made: GrammarCompiler = conformance.create(vocabulary=vocabulary)
    return made


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def spaced(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def schema_request(schema: Any, **layout: Any) -> GrammarRequest:
    return GrammarRequest("json_schema", json.dumps(schema), **layout)


def some_requests() -> list[GrammarRequest]:
    """One of each kind that engines usually have, small enough for every token to be tried."""
    return [
        GrammarRequest("choice", json.dumps(["yes", "no", "nob", "日本"])),
        GrammarRequest("regex", "(ab|a)(c|ba)?[0-9]{0,3}"),
        schema_request({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                        "additionalProperties": False}),
        schema_request({"type": "array", "items": {"enum": ["a", "ab", 10, None]}, "maxItems": 3}),
        schema_request({"type": "string", "maxLength": 4}),
        GrammarRequest("json_object", ""),
    ]  # fmt: skip


def grammars(compiler: GrammarCompiler) -> list[tuple[GrammarRequest, CompiledGrammar]]:
    """Those of `some_requests` that the engine has; at least one."""
    made = [(request, built(compiler, request)) for request in some_requests()]
    found = [(request, grammar) for request, grammar in made if grammar is not None]
    assert found, "the engine refuses every ordinary request"
    return found


def test_masks_allow_what_is_accepted(compiler: GrammarCompiler, vocabulary: TokenVocabulary) -> None:
    """In every state of a few random texts every token is tried."""
    random_ = random.Random(1)

    def compare(grammar: Grammar, ids: list[int]) -> None:
        mask = allowed(grammar, vocabulary)
        for token_id in range(vocabulary.vocab_size):
            verdict = f"{vocabulary.tokens[token_id]!r} after {len(ids)} tokens: the mask and validate() do not agree"
            assert grammar.validate([token_id]) == (token_id in mask), verdict
        refused = random_.choice(sorted(set(range(vocabulary.vocab_size)) - mask))
        assert not grammar.accept(refused), f"{vocabulary.tokens[refused]!r} is accepted, which the mask forbids"
        assert allowed(grammar, vocabulary) == mask, "a token that is refused changes nothing"

    for _, compiled in grammars(compiler):
        for _ in range(3):
            followed(compiled.start(), vocabulary, random_, max_tokens=20, visit=compare)


@pytest.mark.parametrize("source", cases.REGEXES)
def test_regular_expressions_by_brute_force(
    compiler: GrammarCompiler, vocabulary: TokenVocabulary, source: str
) -> None:
    """Against all texts of a few letters that Python says match as a whole."""
    compiled = built(compiler, GrammarRequest("regex", source))
    if compiled is None:
        pytest.skip("the engine refuses it")
    letters = [letter for letter in _ALPHABET if re.search(re.escape(letter), source)] or ["a"]
    if "[" in source or len(letters) < 3:
        letters = [*dict.fromkeys([*letters, "a", "b", "c"])][:4]
    texts = ["".join(word) for length in range(7) for word in itertools.product(letters, repeat=length)]
    matching = [text.encode() for text in texts if re.fullmatch(source, text)]
    _check_language(compiled, vocabulary, matching, depth=4)


@pytest.mark.parametrize("choices", cases.CHOICES, ids=str)
def test_choices_by_brute_force(compiler: GrammarCompiler, vocabulary: TokenVocabulary, choices: list[str]) -> None:
    compiled = built(compiler, GrammarRequest("choice", json.dumps(choices)))
    if compiled is None:
        pytest.skip("the engine refuses it")
    _check_language(compiled, vocabulary, [choice.encode() for choice in choices], depth=12)


def _check_language(compiled: CompiledGrammar, vocabulary: TokenVocabulary, texts: list[bytes], depth: int) -> None:
    """The masks after every beginning of up to `depth` bytes are those of the language `texts`, which is complete for
    texts that are not much longer."""
    beginnings = {text[:i] for text in texts for i in range(len(text) + 1)}
    for beginning in sorted(b for b in beginnings if len(b) <= depth):
        grammar = compiled.start()
        for token_id in tokens_of(beginning, vocabulary):
            assert grammar.accept(token_id), f"{vocabulary.tokens[token_id]!r} of {beginning!r} is not accepted"
        end = "may be" if beginning in texts else "must not be"
        assert grammar.is_accepting() == (beginning in texts), f"{beginning!r} {end} the whole text"
        expected = {i for i, token in enumerate(vocabulary.tokens) if token and beginning + token in beginnings}
        longest = max(map(len, texts))
        within = {i for i in allowed(grammar, vocabulary) if len(beginning + vocabulary.tokens[i]) < longest}
        wrong = [vocabulary.tokens[i] for i in within - expected]
        assert not wrong, f"after {beginning!r} the mask allows {wrong}"
        missing = [vocabulary.tokens[i] for i in expected - allowed(grammar, vocabulary)]
        assert not missing, f"after {beginning!r} the mask forbids {missing}"


@pytest.mark.parametrize("case", cases.SCHEMAS, ids=lambda case: json.dumps(case.schema)[:70])
def test_json_schemas(compiler: GrammarCompiler, vocabulary: TokenVocabulary, case: cases.SchemaCase) -> None:
    """A schema is refused, or values that meet it can be written, on one line or without blanks, others cannot, and
    whatever the masks lead to meets it."""
    jsonschema = pytest.importorskip("jsonschema")
    compiled = built(compiler, schema_request(case.schema))
    if compiled is None:
        pytest.skip("the engine refuses it")
    assert case.valid, "no value meets the schema, and it is not refused"
    for value in case.valid:
        for text in (compact(value), spaced(value)):
            assert accepts(compiled.start(), tokens_of(text, vocabulary)), f"{text} cannot be written"
    for value in case.invalid:
        for text in (compact(value), spaced(value)):
            assert not accepts(compiled.start(), tokens_of(text, vocabulary)), f"{text} can be written"
    kind = jsonschema.Draft202012Validator
    validator = kind(case.schema, format_checker=kind.FORMAT_CHECKER)
    random_ = random.Random(json.dumps(case.schema))
    for _ in range(NUM_WALKS):
        found = followed(compiled.start(), vocabulary, random_, max_tokens=WALK_TOKENS)
        if found is not None:
            assert validator.is_valid(parsed(found)), found


def test_any_object(compiler: GrammarCompiler, vocabulary: TokenVocabulary) -> None:
    compiled = built(compiler, GrammarRequest("json_object", ""))
    if compiled is None:
        pytest.skip("the engine refuses it")
    for value in ({}, {"a": 1}, {"a": [None, {"b": "\n"}], "": -1.5e-3}):
        assert accepts(compiled.start(), tokens_of(compact(value), vocabulary)), value
    for text in (
        "[]",
        "1",
        '{"a"}',
        "{'a': 1}",
        '{"a": 01}',
        '{"a": 1,}',
        '{"a": "\n"}',
        '{"a": "\\x"}',
        "{}}",
        "",
        "{",
    ):
        assert not accepts(compiled.start(), tokens_of(text, vocabulary)), text
    random_ = random.Random(3)
    texts = [followed(compiled.start(), vocabulary, random_, max_tokens=WALK_TOKENS) for _ in range(20)]
    assert all(isinstance(parsed(text), dict) for text in texts if text is not None)


@pytest.mark.parametrize("schema", cases.MALFORMED, ids=str)
def test_malformed_schemas_are_refused(compiler: GrammarCompiler, schema: Any) -> None:
    request = schema_request(schema)
    try:
        problems = compiler.problems(request)
    except InvalidRequestError:
        return
    assert all(isinstance(problem, str) and problem for problem in problems)
    if not problems:
        with pytest.raises(InvalidRequestError):
            compiler.compile(request)


@pytest.mark.parametrize("source", cases.REFUSED_REGEXES)
def test_malformed_expressions_are_refused(compiler: GrammarCompiler, source: str) -> None:
    assert built(compiler, GrammarRequest("regex", source)) is None


def test_an_ordinary_request_is_judged_at_once(compiler: GrammarCompiler) -> None:
    """Whoever asks for the next grammar waits at the same door."""
    request = GrammarRequest("choice", '["yes", "no"]')
    times = []
    for _ in range(3):
        start = perf_counter()
        compiler.problems(request)
        times.append(perf_counter() - start)
    assert min(times) < ORDINARY_S, f"problems() takes {min(times):.2f} s for two choices"


def test_hostile_schemas_are_judged_quickly(compiler: GrammarCompiler) -> None:
    """`problems` is asked at the door, for every request."""
    nested: Any = {"type": "integer"}
    for i in range(12):
        nested = {
            "oneOf": [{"type": "object", "properties": {f"{k}{i}": nested}, "required": [f"{k}{i}"]} for k in "ab"]
        }
    schemas = [
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3_000)}},
        {"enum": [f"value {i}" for i in range(20_000)]},
        {"type": "string", "pattern": "(a{1,500}){1,500}"},
        {"type": "string", "maxLength": 1_000_000},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/a"}}]}}},
    ]
    sources = [*map(json.dumps, schemas), '{"items":' * 50_000 + "{}" + "}" * 50_000]
    for source in sources:
        start = process_time()
        try:
            problems = compiler.problems(GrammarRequest("json_schema", source))
        except InvalidRequestError:
            problems = ["malformed"]
        assert isinstance(problems, list)
        assert process_time() - start < 5, source[:60]


def test_tokens_are_undone(compiler: GrammarCompiler, vocabulary: TokenVocabulary) -> None:
    """Any number of tokens, also beyond what a library may keep, also after the end, also several times."""
    random_ = random.Random(5)
    for request, compiled in grammars(compiler):
        grammar, masks, ids = compiled.start(), [], []
        for _ in range(60):
            masks.append((allowed(grammar, vocabulary), grammar.is_accepting()))
            possible = sorted(masks[-1][0])
            if not possible:
                break
            ids.append(random_.choice(possible))
            assert grammar.accept(ids[-1])
        else:
            masks.append((allowed(grammar, vocabulary), grammar.is_accepting()))
        for _ in range(6):
            keep = random_.randrange(len(ids) + 1)
            grammar.rollback(len(ids) - keep)
            now = (allowed(grammar, vocabulary), grammar.is_accepting())
            assert now == masks[keep], f"rollback({len(ids) - keep}) from {len(ids)} tokens of {request.source!r}"
            for token_id in ids[keep:]:
                assert grammar.accept(token_id)
            assert (allowed(grammar, vocabulary), grammar.is_accepting()) == masks[-1], request
        grammar.rollback(0)
        grammar.rollback(len(ids))
        assert allowed(grammar, vocabulary) == masks[0][0]


def test_a_long_text_is_undone(compiler: GrammarCompiler, vocabulary: TokenVocabulary) -> None:
    compiled = built(compiler, GrammarRequest("regex", "(ab)*c"))
    if compiled is None:
        pytest.skip("the engine refuses it")
    grammar = compiled.start()
    ids = tokens_of("ab" * 150, vocabulary)
    assert all(map(grammar.accept, ids))
    grammar.rollback(299)
    expected = {i for i, t in enumerate(vocabulary.tokens) if t in (b"b", b"ba")}
    assert allowed(grammar, vocabulary) == expected, "299 of 300 tokens were to be undone"
    assert all(map(grammar.accept, ids[1:]))
    grammar.rollback(300)
    assert accepts(grammar, tokens_of("abc", vocabulary))


def test_drafts_are_counted_and_change_nothing(compiler: GrammarCompiler, vocabulary: TokenVocabulary) -> None:
    random_ = random.Random(6)
    for _, compiled in grammars(compiler):
        for _ in range(4):
            grammar, draft = compiled.start(), compiled.start()
            before = allowed(grammar, vocabulary)
            ids: list[int] = []
            while len(ids) < 12 and (possible := sorted(allowed(draft, vocabulary))):
                ids.append(random_.choice(possible))
                assert draft.accept(ids[-1])
            count = grammar.validate(ids)
            assert count == len(ids), f"validate() counts {count} of {len(ids)} tokens that are accepted"
            wrong = random_.choice(sorted(set(range(vocabulary.vocab_size)) - allowed(draft, vocabulary)))
            count = grammar.validate([*ids, wrong, *ids])
            assert count == len(ids), f"validate() counts {count} tokens up to a wrong one behind {len(ids)}"
            assert grammar.validate([]) == 0
            assert allowed(grammar, vocabulary) == before, "validate has changed the state"


def test_sequences_do_not_disturb_one_another(compiler: GrammarCompiler, vocabulary: TokenVocabulary) -> None:
    """As with n > 1: several from one grammar, step by step in turn, and one that is thrown away."""
    for request, compiled in grammars(compiler):
        alone = [_tokens_of_walk(compiled.start(), vocabulary, random.Random(seed)) for seed in range(3)]
        states = [compiled.start() for _ in alone]
        thrown = compiled.start()
        for step in range(max(map(len, alone))):
            for state, ids in zip(states, alone, strict=True):
                if step < len(ids):
                    told = f"what other sequences of {request.source!r} do changes the mask of this one"
                    assert ids[step] in allowed(state, vocabulary), told
                    assert state.accept(ids[step]), request
            if possible := sorted(allowed(thrown, vocabulary)):
                thrown.accept(possible[step % len(possible)])


def _tokens_of_walk(grammar: Grammar, vocabulary: TokenVocabulary, random_: random.Random) -> list[int]:
    ids: list[int] = []
    while len(ids) < 15 and (possible := sorted(allowed(grammar, vocabulary))):
        ids.append(random_.choice(possible))
        assert grammar.accept(ids[-1])
    return ids


def test_the_end_is_the_end(compiler: GrammarCompiler, vocabulary: TokenVocabulary) -> None:
    """After the last brace nothing may follow, not even a blank; before it the text may not end."""
    for schema, text in ((cases.NAME, '{"name": "Ada"}'), (cases.DIGIT, '{"n": 7}')):
        compiled = built(compiler, schema_request(schema))
        if compiled is None:
            pytest.skip("the engine refuses it")
        grammar = compiled.start()
        for token_id in tokens_of(text, vocabulary):
            assert not grammar.is_accepting()
            assert grammar.accept(token_id)
        assert grammar.is_accepting()
        assert not allowed(grammar, vocabulary), f"the mask allows more behind {text}"
        accepted = [token for i, token in enumerate(vocabulary.tokens) if grammar.accept(i)]
        assert not accepted, f"{accepted} are accepted behind {text}"
        assert grammar.is_accepting()


def test_tokens_without_a_text_are_never_allowed(conformance: Conformance) -> None:
    """Special tokens, ids that the tokenizer does not have, and bits beyond the vocabulary; for rows of any width."""
    for extra in (0, 1, 40):
        vocabulary = small_vocabulary(extra)
        compiler: GrammarCompiler = conformance.create(vocabulary=vocabulary)
        silent = {
            i for i in range(vocabulary.num_words * 32) if i >= len(vocabulary.tokens) or not vocabulary.tokens[i]
        }
        for _, compiled in grammars(compiler):
            grammar = compiled.start()
            for _ in range(6):
                mask = allowed(grammar, vocabulary)
                assert mask.isdisjoint(silent), f"tokens without a text are allowed: {sorted(mask & silent)}"
                if not mask:
                    break
                assert grammar.accept(max(mask))
            assert not any(grammar.accept(i) for i in silent if i < vocabulary.vocab_size)


@pytest.mark.parametrize("most", [0, 1, 3, 32])
def test_blanks_are_bounded(compiler: GrammarCompiler, vocabulary: TokenVocabulary, most: int) -> None:
    """A model that likes blanks comes to an end."""
    schema = {"type": "object", "properties": {"n": {"type": "array", "items": {"type": "integer", "maximum": 9,
              "minimum": 0}, "maxItems": 2}}, "required": ["n"], "additionalProperties": False}  # fmt: skip
    compiled = built(compiler, schema_request(schema, max_whitespace=most))
    if compiled is None:
        pytest.skip("the engine refuses it")
    grammar, text = compiled.start(), b""
    blanks = {i for i, token in enumerate(vocabulary.tokens) if token and not token.strip()}
    for _ in range(400):
        mask = allowed(grammar, vocabulary)
        if not mask:
            break
        token_id = max(mask & blanks or mask, key=lambda i: (-len(vocabulary.tokens[i]), i))
        assert grammar.accept(token_id)
        text += vocabulary.tokens[token_id]
    assert grammar.is_accepting(), text
    assert parsed(text)
    assert max(map(len, re.findall(rb"\s+", text)), default=0) <= most, text
    assert accepts(compiled.start(), tokens_of('{"n":[1,2]}', vocabulary))


def test_a_fixed_layout_has_one_space_at_most(compiler: GrammarCompiler, vocabulary: TokenVocabulary) -> None:
    request = schema_request({**cases.DIGIT, "additionalProperties": False}, disable_any_whitespace=True)
    compiled = built(compiler, request)
    if compiled is None:
        pytest.skip("the engine refuses it")
    random_ = random.Random(9)
    texts = {followed(compiled.start(), vocabulary, random_) for _ in range(30)} - {None}
    assert texts
    for text in texts:
        assert text is not None
        assert not re.search(rb"\s\s|[^:,]\s|[\t\r\n]", text), text


def test_blanks_of_ones_own(compiler: GrammarCompiler, vocabulary: TokenVocabulary) -> None:
    compiled = built(compiler, schema_request(cases.DIGIT, whitespace_pattern="(\\n| {2})?"))
    if compiled is None:
        pytest.skip("the engine refuses it")
    assert accepts(compiled.start(), tokens_of('{\n"n":  7}', vocabulary))
    for text in ('{"n": 7}', '{"n":\t7}', '{\n\n"n":7}'):
        assert not accepts(compiled.start(), tokens_of(text, vocabulary)), text


def test_what_is_compiled_travels(conformance: Conformance, vocabulary: TokenVocabulary) -> None:
    """All that another process has of a grammar is what `compile` returned; it can be loaded there and here, twice."""
    here: GrammarCompiler = conformance.create(vocabulary=vocabulary)
    there: GrammarCompiler = conformance.create(vocabulary=vocabulary)
    there.warm_up()
    made = [(request, there.compile(request)) for request in some_requests() if not there.problems(request)]
    for request, data in made:
        assert isinstance(data, bytes), f"compile() returned a {type(data).__name__}, not bytes"
        assert here.load(request, data).size_bytes > 0, "size_bytes must be above 0: the cache adds them up"
    elsewhere = masks_elsewhere(conformance, vocabulary, made)
    for (request, data), expected in zip(made, elsewhere, strict=True):
        masks = [allowed(here.load(request, data).start(), vocabulary) for _ in range(2)]
        assert masks == [expected] * 2, f"{request.source!r} has other masks in another process"
        assert expected, f"a text of {request.source!r} cannot begin"


def test_rows_are_written_in_place(compiler: GrammarCompiler, vocabulary: TokenVocabulary) -> None:
    """A row of a larger array, whatever it held, and nothing of its neighbours."""
    for _, compiled in grammars(compiler):
        grammar = compiled.start()
        batch = np.full((3, vocabulary.num_words), 0x5A5A5A5A, dtype=np.int32)
        grammar.fill_bitmask(batch[1])
        bits = np.unpackbits(batch[1].view(np.uint8), bitorder="little")
        told = "what a row holds before shows in its mask"
        assert set(np.flatnonzero(bits).tolist()) == allowed(grammar, vocabulary), told
        assert (batch[[0, 2]] == 0x5A5A5A5A).all(), "rows of other sequences were written"
