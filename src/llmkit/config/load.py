"""Load the configuration: flags over environment over file over defaults, and the source of every value."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from llmkit.config.engine_config import EngineConfig
from llmkit.config.files import read_file
from llmkit.config.flags import all_flags, flags_by_key
from llmkit.config.keys import OPTIONS, Path, display
from llmkit.config.layers import Given, Layer, env_layer, file_layer, flag_layer
from llmkit.errors import ConfigError, shown

DEFAULT = "default"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Setting:
    """One line of `llmkit config show`."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True)
class LoadedConfig:
    """The configuration. `sources`: dotted key of every setting → "flag --dtype", "env LLMKIT_DTYPE",
    "file engine.toml:3" or "default". `warnings`: sentences for the user."""

    config: EngineConfig
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    _paths: Mapping[str, Path] = field(default_factory=dict, repr=False)

    def settings(self) -> Iterator[Setting]:
        """Every setting with its value and source, in the order of the sections, options of plugins last. Values that
        are secret are starred out."""
        for key, source in self.sources.items():
            value: Any = self.config
            for name in self._paths[key]:
                value = value[name] if isinstance(value, Mapping) else getattr(value, name)
            flag = flags_by_key().get(key)
            yield Setting(key, "***" if flag and flag.secret and value else value, source)


def load_config(
    *,
    flags: Mapping[str, Any] | None = None,
    settings: Iterable[str] = (),
    file: FilePath | str | None = None,
    env: Mapping[str, str] | None = None,
    origin: str = "flag",
) -> LoadedConfig:
    """Merge all sources and check the result.

    flags: values by dotted ("scheduler.max_num_seqs") or flat key ("max_num_seqs", "max-num-seqs"), or a section's
    name with a mapping; None means not given. settings: `KEY=VALUE` texts of `--set`; both together are one layer, and
    may not contradict each other. env: `os.environ` unless given. origin: what to call `flags` in messages,
    "argument" when they come from Python. Raises ConfigError for anything wrong, naming the key and its source.
    """
    from_env, warnings = env_layer(os.environ if env is None else env)
    from_file = file_layer(read_file(FilePath(file))) if file is not None else Layer()
    merged = from_file.given | from_env.given | flag_layer(flags or {}, settings, origin).given
    for warning in warnings:
        logger.warning("%s", warning)
    config = _build(merged)
    paths = _all_paths(merged)
    sources = {key: merged[path].source if path in merged else DEFAULT for key, path in paths.items()}
    return LoadedConfig(config, sources, tuple(warnings), paths)


def _all_paths(merged: Mapping[Path, Given]) -> dict[str, Path]:
    """Displayed key → path: every setting, tables by their keys where some are given, then options of plugins."""
    paths: list[Path] = []
    for flag in all_flags():
        path = tuple(flag.key.split("."))
        inner = [given for given in merged if given[: len(path)] == path and len(given) > len(path)]
        if path != OPTIONS:
            paths += inner or [path]
    paths += sorted(path for path in merged if path[:2] == OPTIONS)
    return {display(path): path for path in paths}


def _build(merged: Mapping[Path, Given]) -> EngineConfig:
    tree: dict[str, Any] = {}
    for path, given in merged.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = given.value
    try:
        return EngineConfig.model_validate(tree)
    except ValidationError as error:
        messages = dict.fromkeys(_message(details, merged) for details in error.errors())
        # The pydantic error says the same once more, in its own terms.
        raise ConfigError(" ".join(messages)) from None


def _message(details: ErrorDetails, merged: Mapping[Path, Given]) -> str:
    """One sentence about one validation error, in the user's terms."""
    if details["type"] == "contradiction":
        keys = details["ctx"]["keys"]
        given = {key: merged[path].source for key in keys if (path := tuple(key.split("."))) in merged}
        return f"{details['msg']} ({', '.join(given.values()) or DEFAULT})."
    location = tuple(str(part) for part in details["loc"])
    path = next((location[:n] for n in range(len(location), 0, -1) if location[:n] in merged), location[:2])
    value, source = details["input"], DEFAULT
    if path in merged:
        value, source = merged[path].value, merged[path].source
    flag = flags_by_key().get(".".join(path))
    if flag and details["type"] == "string_pattern_mismatch":
        return f"{display(path)} cannot be {shown(details['input'])} ({source}). {flag.description}"
    allowed = flag.allowed if flag else details["msg"]
    text = "what was given" if flag and flag.secret else shown(value)
    return f"{display(path)} must be {allowed}; {text} is not ({source})."
