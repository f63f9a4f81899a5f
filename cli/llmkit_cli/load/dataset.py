"""What the requests of a load ask for: random lengths, a workload of `llmkit bench`, or a file."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llmkit.errors import ConfigError
from llmkit_cli.bench.workloads import names, workload

Endpoint = Literal["completions", "chat"]

PATHS: dict[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

# One token each in the usual vocabularies, with the space before: text of about so many tokens for chats.
_WORDS = (  # noqa: SIM905 - a list literal would be a line a word
    "the of and to in is that for it as with on was be by at this from are have not or an they which one you had "
    "were all her she there would their we him been has when who will no more if out so up said what its about "
    "than into them can only other time new some could these two may first then do any like my now over such our "
    "man me even most made after also did many off before must well back through years much where your way down "
    "should because long each just state those people too little good world make very year still see own work "
    "men day get here old between both life being under three never know same last another while us might great "
    "go come since against right came take used himself few house use place during high without again home "
    "around small found "
).split()


@dataclass(frozen=True)
class LoadItem:
    """One request: a text, token ids or messages, the most tokens to generate (None: the server's choice), and fields
    of the body besides."""

    prompt: Any
    max_tokens: int | None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RandomLengths:
    """Prompts of random tokens. ratio: lengths are uniform within ± that part of input_len and output_len.
    prefix_len: tokens before them that all prompts share. vocabulary: ids are below."""

    input_len: int = 256
    output_len: int = 128
    ratio: float = 0.0
    prefix_len: int = 0
    vocabulary: int = 32_000

    def items(self, count: int, endpoint: Endpoint, seed: int | str) -> list[LoadItem]:
        """Token ids for completions; for chats words, about a token each."""
        rng = random.Random(seed)
        prefix = self._tokens(rng, self.prefix_len, endpoint)
        items = []
        for _ in range(count):
            prompt = prefix + self._tokens(rng, self._length(rng, self.input_len), endpoint)
            text: Any = prompt if endpoint == "completions" else [{"role": "user", "content": " ".join(prompt)}]
            items.append(LoadItem(text, self._length(rng, self.output_len)))
        return items

    def _length(self, rng: random.Random, mean: int) -> int:
        return max(1, rng.randint(round(mean * (1 - self.ratio)), round(mean * (1 + self.ratio))))

    def _tokens(self, rng: random.Random, count: int, endpoint: Endpoint) -> list[Any]:
        if endpoint == "chat":
            return rng.choices(_WORDS, k=count)
        return [rng.randrange(10, self.vocabulary) for _ in range(count)]


def items_of(
    dataset: str, endpoint: Endpoint, count: int | None, lengths: RandomLengths, seed: int | str
) -> list[LoadItem]:
    """`count` requests of a dataset, begun again from its start if it has fewer; None: all of them, 100 random ones.

    dataset: "random", a workload's name, or a .jsonl file. Raises ConfigError.
    """
    if dataset == "random":
        return lengths.items(100 if count is None else count, endpoint, seed)
    if dataset.endswith(".jsonl"):
        items = read_items(Path(dataset), endpoint)
    elif dataset in names() or dataset.startswith("batch-"):
        if endpoint == "chat":
            raise ConfigError(f"The workload {dataset} is made of token ids, which only completions take.")
        items = [LoadItem(item.prompt, item.max_tokens) for item in workload(dataset, lengths.vocabulary)]
    else:
        raise ConfigError(
            f"There is no dataset {dataset!r}.", hint=f"It is random, a .jsonl file, or one of {', '.join(names())}."
        )
    return items if count is None else list(itertools.islice(itertools.cycle(items), count))


def read_items(file: Path, endpoint: Endpoint) -> list[LoadItem]:
    """One request a line: an object with `prompt` (text or token ids) or `messages`, maybe `max_tokens`, and maybe
    other fields for the body. Raises ConfigError naming the line."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The dataset {file} cannot be read: {error}.") from error
    items = [_item(line, f"{file}:{number}", endpoint) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise ConfigError(f"The dataset {file} is empty.")
    return items


def _item(line: str, where: str, endpoint: Endpoint) -> LoadItem:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is not a JSON object.")
    fields = dict(value)
    prompt, messages, max_tokens = (fields.pop(name, None) for name in ("prompt", "messages", "max_tokens"))
    if (prompt is None) == (messages is None):
        raise ConfigError(f"{where} must have either prompt or messages.")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ConfigError(f"{where}: max_tokens must be a whole number above 0.")
    if endpoint == "completions":
        if prompt is None:
            raise ConfigError(f"{where} has messages: they go with --endpoint chat.")
        return LoadItem(prompt, max_tokens, fields)
    if messages is None:
        if not isinstance(prompt, str):
            raise ConfigError(f"{where} has token ids, which only completions take.")
        messages = [{"role": "user", "content": prompt}]
    return LoadItem(messages, max_tokens, fields)


def body_of(item: LoadItem, endpoint: Endpoint, model: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of its request, streamed with usage; `fields` of all requests, the item's own on top."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    body["prompt" if endpoint == "completions" else "messages"] = item.prompt
    if item.max_tokens is not None:
        body["max_tokens"] = item.max_tokens
    return {**body, **fields, **item.fields}
