"""What structured output costs: masks per token, compilation, and the steps of others while a large schema compiles.

    python benchmarks/structured_output.py masks --model smollm2-135m-instruct
    python benchmarks/structured_output.py compile
    python benchmarks/structured_output.py steps
    python benchmarks/structured_output.py first

`masks` puts the grammars of each engine beside XGrammar's own reading of the same schema, in the same run.
`first` is a server's engine, new for each figure: a stream, and beside it the first request with a grammar.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from llmkit import AsyncLLM, SamplingParams
from llmkit.config import load_config
from llmkit.errors import InvalidRequestError
from llmkit.frontend.token_vocabulary import TokenVocabulary
from llmkit.hookspecs.structured import CompiledGrammar, GrammarRequest

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "city": {"enum": ["Paris", "London", "New York"]},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "city"],
        },
        "score": {"type": "number"},
    },
    "required": ["name", "age", "email", "tags", "address"],
}
SOMEBODY = {
    "name": "Ludwig van Beethoven, composer of nine symphonies",
    "age": 56,
    "email": "ludwig@example.org and more",
    "tags": ["music", "deaf", "Bonn and Vienna"],
    "address": {"street": "Schwarzspanierstrasse 15", "city": "London", "zip": "12345"},
    "score": 97.5,
}
LARGE: dict[str, Any] = {
    "person": PERSON,
    "300 properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}},
    "3000 properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3_000)}},
    "enum of 20000": {"enum": [f"value number {i}" for i in range(20_000)]},
    "(a{1,500}){1,500}": {"type": "string", "pattern": "(a{1,500}){1,500}"},
    "maxLength 1000000": {"type": "string", "maxLength": 1_000_000},
}
SLOW = {"regex": "abcdefghij klmnop " * 6 + "((a?b?c?d?e?f?){1,100}){1,100}"}
"""Harmless for its first 48 tokens; masks of seconds behind them."""


def prepared(model: str) -> Any:
    from llmkit.engine.factory import prepare_model

    return prepare_model(load_config(flags={"model.model": model}).config)


def request_of(schema: Any) -> GrammarRequest:
    return GrammarRequest("json_schema", json.dumps(schema))


def masks(model: str) -> dict[str, Any]:
    """Microseconds per token of a fixed text, the best of five runs over it."""
    found = prepared(model)
    vocabulary = found.grammars.vocabulary
    ids = found.tokenizer.encode(json.dumps(SOMEBODY), add_special_tokens=False)
    result: dict[str, Any] = {"tokens": len(ids)}
    for row in found.registry.find("structured"):
        compiler = found.grammars.compiler(row.name)
        request = request_of(PERSON)
        if compiler.problems(request):
            result[row.name] = compiler.problems(request)[0]
            continue
        compiler.warm_up()
        result[row.name] = followed(compiler.load(request, compiler.compile(request)), ids, vocabulary)
    result["xgrammar's own reading, any number of blanks"] = followed(native(vocabulary, None), ids, vocabulary)
    result["xgrammar's own reading, 32 blanks"] = followed(native(vocabulary, 32), ids, vocabulary)
    return result


def native(vocabulary: TokenVocabulary, blanks: int | None) -> CompiledGrammar:
    """The schema compiled by XGrammar alone, without what llmkit adds to make it exact."""
    from llmkit_structured.xgrammar_grammar import CompiledXGrammar, XGrammarCompiler

    ours = XGrammarCompiler(vocabulary)
    compiled = ours._made().compile_json_schema(json.dumps(PERSON), max_whitespace_cnt=blanks)
    return CompiledXGrammar(compiled, vocabulary.stop_token_id, ours._text)


def followed(compiled: CompiledGrammar, ids: list[int], vocabulary: TokenVocabulary) -> dict[str, float]:
    row = np.zeros(vocabulary.num_words, dtype=np.int32)
    best: list[list[float]] = []
    for _ in range(5):
        grammar, fills, accepts = compiled.start(), [], []
        for token_id in ids:
            start = time.perf_counter()
            grammar.fill_bitmask(row)
            filled = time.perf_counter()
            assert grammar.accept(token_id), "the text must be one of the grammar's"
            fills.append((filled - start) * 1e6)
            accepts.append((time.perf_counter() - filled) * 1e6)
        if not best or sum(fills) < sum(best[0]):
            best = [fills, accepts]
    fills, accepts = best
    return {
        "mask_mean_us": round(statistics.mean(fills), 1),
        "mask_p95_us": round(float(np.percentile(fills, 95)), 1),
        "mask_max_us": round(max(fills), 1),
        "accept_mean_us": round(statistics.mean(accepts), 1),
    }


def compile_times(model: str) -> dict[str, Any]:
    """Seconds to judge, compile and load each schema, without the compile process around it. What is compiled by one
    is loaded by another, as in another process."""
    found = prepared(model)
    plugin, given = found.grammars.backend("xgrammar").plugin, {"vocabulary": found.grammars.vocabulary}
    compiler, other = (found.registry.build(plugin, given) for _ in range(2))
    compiler.warm_up()
    other.warm_up()
    result = {}
    for name, schema in LARGE.items():
        request = request_of(schema)
        times, data = [], b""
        for step in (lambda r=request: compiler.problems(r), lambda r=request: compiler.compile(r)):
            start = time.perf_counter()
            data = step()
            times.append(round(time.perf_counter() - start, 3))
        start = time.perf_counter()
        compiled = other.load(request, data)
        times.append(round(time.perf_counter() - start, 3))
        result[name] = dict(zip(("problems_s", "compile_s", "load_s"), times, strict=True)) | {
            "megabytes": round(compiled.size_bytes / 1e6, 1)
        }
    return result


async def steps(model: str) -> dict[str, Any]:
    """Milliseconds between the tokens of a plain stream, alone and while a request with a large schema, or with slow
    masks, is under way."""
    result = {}
    async with AsyncLLM(model, max_model_len=4096, max_num_seqs=4, num_blocks=600, preload_grammars=True) as llm:
        await once(llm, {"choice": ["yes"]})
        result["alone"] = await gaps(llm, asyncio.sleep(4))
        for name, schema in LARGE.items():
            result[name] = await gaps(llm, once(llm, {"json": schema}))
        result["slow masks"] = await gaps(llm, once(llm, SLOW, max_tokens=100))
    return result


def first(model: str) -> dict[str, Any]:
    """The largest gap between two tokens of a stream beside the first grammar of an engine process, by whether the
    library is preloaded, taking turns; and what that does to the start."""
    result: dict[str, Any] = {"preloaded": [], "with the first grammar": []}
    for _ in range(3):
        for name, runs in result.items():
            runs.append(asyncio.run(first_grammar(model, name == "preloaded")))
    return result


async def first_grammar(model: str, preload: bool) -> dict[str, Any]:
    start = time.perf_counter()
    async with AsyncLLM(model, max_model_len=4096, num_blocks=600, preload_grammars=preload) as llm:
        started = time.perf_counter()
        return {"start_s": round(started - start, 2), **await gaps(llm, once(llm, {"json": PERSON}))}


async def once(llm: AsyncLLM, constraint: dict[str, Any], max_tokens: int = 3) -> str | None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=constraint)
    try:
        outputs = [output async for output in llm.generate("JSON: ", params)]
    except InvalidRequestError as error:
        return str(error)
    return outputs[-1].error or outputs[-1].outputs[0].finish_reason


async def gaps(llm: AsyncLLM, meanwhile: Coroutine[Any, Any, Any]) -> dict[str, Any]:
    free = SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0, output_kind="delta")
    stream = llm.submit("Once upon a time", free)
    times: list[float] = []

    async def read() -> None:
        async for _ in stream:
            times.append(time.perf_counter())  # noqa: PERF401 - who waits looks at them meanwhile

    reader = asyncio.create_task(read())
    while len(times) < 20:
        await asyncio.sleep(0.01)
    start = time.perf_counter()
    outcome = await meanwhile
    ended = time.perf_counter()
    stream.abort()
    await reader
    between = [1e3 * (b - a) for a, b in itertools.pairwise(times) if b > start]
    return {
        "median_ms": round(statistics.median(between), 1),
        "largest_ms": round(max(between), 1),
        "tokens": len(between),
        "request_ended": outcome,
        "request_s": round(ended - start, 2),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("masks", "compile", "steps", "first"))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    arguments = parser.parse_args()
    runs: dict[str, Callable[[str], Any]] = {
        "masks": masks,
        "compile": compile_times,
        "steps": lambda model: asyncio.run(steps(model)),
        "first": first,
    }
    measured = runs[arguments.what](arguments.model)
    print(json.dumps(measured, indent=1))
