"""What a grammar costs: time to compile, and time of a mask, for every grammar engine on the same requests.

    python benchmarks/grammar_cost.py MODEL [--engines guidance,outlines] [--json FILE]

MODEL is a folder or GGUF file, of which only the tokenizer is read. Compiling is `compile` and `load` together by one
compiler, the least of three, after `warm_up`; a mask is `fill_bitmask` at each token of a fixed text, and `accept` of
that token: the median of the second time that the text is gone through, the greatest of both times. Prints a table;
"refused" where the engine cannot express the request.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from llmkit.errors import InvalidRequestError
from llmkit.frontend.token_vocabulary import TokenVocabulary
from llmkit.hookspecs.structured import GrammarCompiler, GrammarRequest
from llmkit.registry import Registry

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "role": {"enum": ["admin", "user", "guest"]},
    },
    "required": ["name", "age", "email", "tags", "role"],
    "additionalProperties": False,
}
FLAT = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "ok": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["city", "ok", "n"],
    "additionalProperties": False,
}
LONG = "The quick brown fox jumps over the lazy dog while the band plays on and on"
CASES: dict[str, tuple[GrammarRequest, str]] = {
    "flat object": (
        GrammarRequest("json_schema", json.dumps(FLAT)),
        json.dumps({"city": LONG, "ok": True, "n": 12345}),
    ),
    "person": (
        GrammarRequest("json_schema", json.dumps(PERSON)),
        json.dumps({"name": "Ada Lovelace", "age": 36, "email": "ada@example.org", "tags": ["a b"], "role": "user"}),
    ),
    "any object": (GrammarRequest("json_object", ""), json.dumps({"a": [1, {"b": LONG}], "c": None})),
    "300 properties": (
        GrammarRequest(
            "json_schema",
            json.dumps(
                {
                    "type": "object",
                    "properties": {f"property_{i}": {"type": "integer"} for i in range(300)},
                    "required": [f"property_{i}" for i in range(300)],
                    "additionalProperties": False,
                }
            ),
        ),
        json.dumps({f"property_{i}": i for i in range(300)}),
    ),
    "regex": (GrammarRequest("regex", r"[A-Z][a-z]{1,20}, \d{4}-\d{2}-\d{2}( \w+)*"), "Monday, 2024-02-29 was a day"),
    "1000 choices": (
        GrammarRequest("choice", json.dumps([f"choice number {i}" for i in range(1000)])),
        "choice number 7",
    ),
}


def measured(compiler: GrammarCompiler, vocabulary: TokenVocabulary, request: GrammarRequest, ids: list[int]) -> Any:
    """Seconds to compile, then median and greatest of a mask; None if the engine refuses."""
    if compiler.problems(request):
        return None
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        try:
            compiled = compiler.load(request, compiler.compile(request))
        except InvalidRequestError:
            return None
        seconds.append(time.perf_counter() - start)
        if seconds[-1] > 5:
            break
    row, masks, greatest = np.zeros(vocabulary.num_words, dtype=np.int32), [0.0], 0.0
    for _ in range(2):  # the second time, as in a batch of the same grammar, tables are warm
        grammar, greatest, masks = compiled.start(), max(greatest, *masks), []
        for token_id in ids:
            start = time.perf_counter()
            grammar.fill_bitmask(row)
            accepted = grammar.accept(token_id)
            masks.append(time.perf_counter() - start)
            assert accepted, "the text does not meet the request"
    return min(seconds), statistics.median(masks), max(greatest, *masks)


def shown(seconds: float) -> str:
    """A time in its customary unit."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


def main() -> int:
    parser = argparse.ArgumentParser(description="time to compile grammars and to fill masks")
    parser.add_argument("model", type=Path)
    parser.add_argument("--engines", help="names, comma-separated; default: all of llmkit's own")
    parser.add_argument("--json", help="write the figures, in seconds, to this file")
    arguments = parser.parse_args()
    registry = Registry.discover()
    tokenizer = find_tokenizer(arguments.model)
    vocabulary = TokenVocabulary.of(tokenizer, tokenizer.vocab_size, [tokenizer.eos_token_id])
    names = [row.name for row in registry.find("structured") if row.distribution == "llmkit"]
    figures: dict[str, dict[str, Any]] = {}
    print(f"{vocabulary.vocab_size} tokens\n")
    print("| request | engine | compile | mask, median | mask, greatest |\n|---|---|---|---|---|")
    for case, (request, text) in CASES.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        for name in arguments.engines.split(",") if arguments.engines else sorted(names):
            compiler: GrammarCompiler = registry.build(registry.load("structured", name), {"vocabulary": vocabulary})
            compiler.warm_up()
            found = figures.setdefault(case, {})[name] = measured(compiler, vocabulary, request, ids)
            cells = ["refused", "", ""] if found is None else [shown(value) for value in found]
            print(f"| {case} | {name} | {' | '.join(cells)} |", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return 0


def find_tokenizer(model: Path) -> Any:
    """The tokenizer of a model folder or GGUF file."""
    from llmkit.frontend.tokenizers_hf import load_hf_tokenizer

    if model.is_dir():
        return load_hf_tokenizer(model)
    from llmkit_weights.gguf_format import GgufFormat

    return GgufFormat().tokenizer(model)


if __name__ == "__main__":
    sys.exit(main())
