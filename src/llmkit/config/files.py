"""Configuration files, TOML or YAML: their keys and values, and the line of every key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmkit.errors import ConfigError

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class ConfigFile:
    """What a file says. `lines`: keys as written, from the top → line number, from 1; keys in lists are not listed."""

    path: Path
    values: dict[str, Any]
    lines: dict[KeyPath, int]

    def where(self, keys: KeyPath) -> str:
        """`path:line` of a key, or only the path if the line is not known."""
        line = self.lines.get(keys)
        return f"{self.path}:{line}" if line else str(self.path)


def read_file(path: Path) -> ConfigFile:
    """Read `path` by its suffix. An empty file has no settings.

    Raises ConfigError if it is missing, not text, malformed, has a key twice, or is not a table of keys.
    """
    readers = {".toml": _read_toml, ".yaml": _read_yaml, ".yml": _read_yaml}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"The configuration file {path} must end in {', '.join(readers)}.")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"The configuration file {path} is not UTF-8 text: {error}.") from error
    return reader(path, text)


def _read_yaml(path: Path, text: str) -> ConfigFile:
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        _check_yaml(path, node, (), lines, set())
        values = {} if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"The configuration file {path} is not valid YAML: {_yaml_reason(error)}.") from error
    finally:
        loader.dispose()
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"The configuration file {path} must hold keys and values, not a {type(values).__name__}.")
    return ConfigFile(path, values, lines)


def _check_yaml(path: Path, node: Any, above: KeyPath, lines: dict[KeyPath, int], seen: set[int]) -> None:
    """Note the line of every key; refuse what the YAML loader lets pass: a key twice, or one that is not text.

    `seen`: nodes checked already; aliases make a node appear again, even inside itself."""
    import yaml

    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_yaml(path, item, (*above, "[]"), {}, seen)
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        if key_node.tag != "tag:yaml.org,2002:str":
            shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or table"
            raise ConfigError(f"The key {shown} in {path}:{line} must be text; put it in quotes.")
        keys = (*above, key_node.value)
        if keys in lines:
            raise ConfigError(f"The key {'.'.join(keys)} is given twice in {path}: lines {lines[keys]} and {line}.")
        lines[keys] = line
        _check_yaml(path, value_node, keys, lines, seen)


def _yaml_reason(error: Exception) -> str:
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    return f"line {mark.line + 1}: {problem}" if mark and problem else _one_line(error)


def _read_toml(path: Path, text: str) -> ConfigFile:
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The configuration file {path} is not valid TOML: {_toml_reason(error, text)}.") from error
    return ConfigFile(path, values, _toml_lines(text))


_TOML_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_TOML_DOTTED = rf"{_TOML_KEY}(?:\s*\.\s*{_TOML_KEY})*"
_TOML_HEADER = re.compile(rf"\s*\[\s*({_TOML_DOTTED})\s*\]\s*(?:#.*)?$")
_TOML_ASSIGNMENT = re.compile(rf"\s*({_TOML_DOTTED})\s*=")


def _toml_keys(text: str) -> Iterator[tuple[KeyPath, int]]:
    """The keys of a TOML text with their lines, which tomllib itself does not tell. A line inside a multi-line value
    that looks like an assignment is listed too, which does no harm: only keys that exist are looked up."""
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _TOML_HEADER.match(line):
            table = _toml_parts(header[1])
            yield table, number
        elif assignment := _TOML_ASSIGNMENT.match(line):
            yield (*table, *_toml_parts(assignment[1])), number


def _toml_lines(text: str) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}
    for keys, number in _toml_keys(text):
        lines.setdefault(keys, number)
    return lines


def _toml_parts(dotted: str) -> KeyPath:
    return tuple(part.strip("\"'") for part in re.findall(_TOML_KEY, dotted))


def _toml_reason(error: tomllib.TOMLDecodeError, text: str) -> str:
    """The parser's message; for a key given twice, which it does not name, the key and its lines."""
    if "overwrite" in str(error) or "twice" in str(error):
        lines: dict[KeyPath, int] = {}
        for keys, number in _toml_keys(text):
            if keys in lines:
                return f"the key {'.'.join(keys)} is given twice, in lines {lines[keys]} and {number}"
            lines[keys] = number
    return _one_line(error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")
