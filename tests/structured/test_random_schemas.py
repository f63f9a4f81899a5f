"""Whatever an engine does not refuse, it enforces: random schemas, random texts that the masks lead to, and a validator
of somebody else's."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import jsonschema
import pytest

from llmkit.hookspecs.structured import GrammarCompiler, GrammarRequest
from llmkit.registry import Registry
from llmkit.testing.grammar import accepts, built, followed, parsed, small_vocabulary, tokens_of

DEEP = bool(os.environ.get("LLMKIT_DEEP_TESTS"))
ENGINES = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
NUM_SCHEMAS = {"xgrammar": 60, "guidance": 60, "outlines": 25, "lm-format-enforcer": 20}
NAMES = ["a", "b", "ab", "é", "x y"]
TEXTS = ["a", "ab", "yes", "é", "10", ""]
PATTERNS = ["^[ab]+$", "^a", "b$", "^(yes|no)$", "^[0-9]{2}-x?$", "^[^ab]{1,2}$", "^\\w*$"]


def random_schema(random_: random.Random, depth: int = 0) -> Any:
    """A schema of a few keywords, nested up to three deep."""
    makers = [_string, _number, _literals, _simple, _string, _number]
    if depth < 3:
        makers += [_array, _object, _object, _combined]
    return random_.choice(makers)(random_, depth)


def _string(random_: random.Random, _depth: int) -> Any:
    schema: dict[str, Any] = {"type": "string"}
    kind = random_.randrange(4)
    if kind == 0:
        schema["minLength"] = random_.randrange(4)
        schema["maxLength"] = schema["minLength"] + random_.randrange(4)
    elif kind == 1:
        schema["pattern"] = random_.choice(PATTERNS)
        if random_.random() < 0.4:
            schema["maxLength"] = 3
    elif kind == 2:
        schema["format"] = random_.choice(["date", "time", "ipv4", "uuid", "email", "date-time", "hostname"])
    return schema


def _number(random_: random.Random, _depth: int) -> Any:
    schema: dict[str, Any] = {"type": random_.choice(["integer", "number"])}
    low = random_.choice([-12, -1, 0, 0.5, 3, 99])
    if random_.random() < 0.5:
        schema[random_.choice(["minimum", "exclusiveMinimum"])] = low
    if random_.random() < 0.5:
        schema[random_.choice(["maximum", "exclusiveMaximum"])] = low + random_.choice([0, 0.25, 1, 17, 1000])
    if random_.random() < 0.2:
        schema["multipleOf"] = random_.choice([2, 10, 0.5, 0.01, 7])
    return schema


def _literals(random_: random.Random, _depth: int) -> Any:
    values = [*TEXTS, 1, 0, -2.5, 10, None, True, False, [1, "a"], {"a": None}]
    return {"enum": random_.sample(values, random_.randrange(1, 4))}


def _simple(random_: random.Random, _depth: int) -> Any:
    return random_.choice([{"type": "null"}, {"type": "boolean"}, {"type": ["null", "integer"]}, {}, True])


def _array(random_: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "array"}
    if random_.random() < 0.8:
        schema["items"] = random_schema(random_, depth + 1)
    if random_.random() < 0.3:
        schema["prefixItems"] = [random_schema(random_, depth + 1) for _ in range(random_.randrange(1, 3))]
    if random_.random() < 0.5:
        schema["minItems"] = random_.randrange(3)
    if random_.random() < 0.5:
        schema["maxItems"] = random_.randrange(4)
    return schema


def _object(random_: random.Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "object"}
    names = random_.sample(NAMES, random_.randrange(4))
    if names:
        schema["properties"] = {name: random_schema(random_, depth + 1) for name in names}
    if random_.random() < 0.6:
        schema["required"] = random_.sample(NAMES, random_.randrange(3))
    if random_.random() < 0.5:
        schema["additionalProperties"] = random_.choice([False, False, {"type": "integer"}])
    if random_.random() < 0.2:
        schema[random_.choice(["minProperties", "maxProperties"])] = random_.randrange(3)
    if random_.random() < 0.1:
        schema["dependentRequired"] = {random_.choice(NAMES): random_.sample(NAMES, 1)}
    if random_.random() < 0.1:
        schema["dependentSchemas"] = {random_.choice(NAMES): _object(random_, depth + 1)}
    return schema


def _combined(random_: random.Random, depth: int) -> Any:
    parts = [random_schema(random_, depth + 1) for _ in range(2)]
    if random_.random() < 0.15:
        return {"type": "object", "properties": {"a": {"$ref": "#"}, "b": parts[0]}, "additionalProperties": False}
    if random_.random() < 0.2:
        return {"if": parts[0], "then": parts[1], "else": {"not": parts[1]}, "type": ["object", "string", "number"]}
    return {random_.choice(["anyOf", "allOf", "oneOf"]): parts}


def compiler_of(engine: str) -> GrammarCompiler:
    registry = Registry.discover()
    compiler: GrammarCompiler = registry.build(registry.load("structured", engine), {"vocabulary": VOCABULARY})
    return compiler


VOCABULARY = small_vocabulary()


@pytest.mark.parametrize("engine", ENGINES)
def test_random_texts_meet_random_schemas(engine: str) -> None:
    compiler, random_ = compiler_of(engine), random.Random(11)
    num_texts = 0
    for _ in range(NUM_SCHEMAS[engine] * (40 if DEEP else 1)):
        schema = random_schema(random_)
        source = json.dumps(schema)
        if len(source) > 400:
            continue
        compiled = built(compiler, GrammarRequest("json_schema", source))
        if compiled is None:
            continue
        kind = jsonschema.Draft202012Validator
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        for _ in range(6):
            text = followed(compiled.start(), VOCABULARY, random_, max_tokens=80)
            if text is not None:
                num_texts += 1
                assert validator.is_valid(parsed(text)), (source, text)
                assert accepts(compiled.start(), tokens_of(text, VOCABULARY, random_)) or engine != "guidance"
    assert num_texts > 30
