"""Configuration files, TOML or YAML: their keys and values, and the line of every key."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmkit.config.values import UNREADABLE, reason
from llmkit.errors import ConfigError, described

KeyPath = tuple[str, ...]

MAX_BYTES = 1 << 20
MAX_VALUES = 100_000
"""Values in a file, those that aliases of YAML repeat counted each time."""


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

    Raises ConfigError if it is missing, not text, malformed, too large, has a key twice, or is not a table of keys.
    """
    readers = {".toml": _read_toml, ".yaml": _read_yaml, ".yml": _read_yaml}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"The configuration file {path} must end in {', '.join(readers)}.")
    return reader(path, _read_text(path))


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"The configuration file {path} is larger than {MAX_BYTES} bytes.")
        return content.decode("utf-8-sig")  # editors on Windows write a mark in front
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(f"The configuration file {path} is not UTF-8 text: {error}.") from error
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"The configuration file {path} cannot be read: {why}.") from error


def _read_yaml(path: Path, text: str) -> ConfigFile:
    import yaml

    class Loader(yaml.SafeLoader):
        """With times as YAML has them: some library may have made texts of them in the loader that all share."""

    timestamp: Any = Loader.construct_yaml_timestamp
    Loader.add_constructor("tag:yaml.org,2002:timestamp", timestamp)
    lines: dict[KeyPath, int] = {}
    try:
        loader = Loader(text)
        try:
            node = loader.get_single_node()
            _check_yaml(path, node, (), lines, {})
            values = {} if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except Exception as error:  # `!!int x` or `2024-99-99`: the loader lets through whatever Python says of them
        raise ConfigError(f"The configuration file {path} is not valid YAML: {_yaml_reason(error)}.") from error
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise ConfigError(f"The configuration file {path} must hold keys and values, not a {type(values).__name__}.")
    return ConfigFile(path, values, lines)


def _check_yaml(path: Path, node: Any, above: KeyPath, lines: dict[KeyPath, int], sizes: dict[int, int]) -> int:
    """How many values a node stands for. Notes the line of every key.

    Refuses what the YAML loader lets pass: a key twice, or one that is not text; aliases of a node inside itself, or of
    so many that the file stands for far more than it holds. `sizes`: of the nodes seen so far, 0 for one that is
    being counted; aliases make a node appear again.
    """
    import yaml

    if id(node) in sizes:
        if not sizes[id(node)]:
            raise ConfigError(f"{'.'.join(above)} in {path}:{node.start_mark.line + 1} contains itself.")
        return sizes[id(node)]
    sizes[id(node)] = 0
    count = 1
    if isinstance(node, yaml.SequenceNode):
        count += sum(_check_yaml(path, item, (*above, "[]"), {}, sizes) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                count += _check_yaml(path, value_node, (*above, key_node.value), {}, sizes)
            else:
                keys = (*above, _yaml_key(path, key_node))
                line = key_node.start_mark.line + 1
                if keys in lines:
                    both = f"lines {lines[keys]} and {line}"
                    raise ConfigError(f"The key {'.'.join(keys)} is given twice in {path}: {both}.")
                lines[keys] = line
                count += _check_yaml(path, value_node, keys, lines, sizes)
    if count > MAX_VALUES:
        raise ConfigError(f"The configuration file {path} stands for more than {MAX_VALUES} values.")
    sizes[id(node)] = count
    return count


def _yaml_key(path: Path, node: Any) -> str:
    import yaml

    if node.tag == "tag:yaml.org,2002:str" and isinstance(node, yaml.ScalarNode):
        return str(node.value)
    shown = node.value if isinstance(node, yaml.ScalarNode) else "a list or table"
    raise ConfigError(f"The key {shown} in {path}:{node.start_mark.line + 1} must be text; put it in quotes.")


def _yaml_reason(error: Exception) -> str:
    import yaml

    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark and problem:
        return f"line {mark.line + 1}: {problem}"
    if isinstance(error, yaml.YAMLError | ValueError | RecursionError):
        return reason(error)
    return f"a value is not of the type that its tag says ({described(error)})"


def _read_toml(path: Path, text: str) -> ConfigFile:
    try:
        values = tomllib.loads(text)
    except UNREADABLE as error:
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


def _toml_reason(error: Exception, text: str) -> str:
    """The parser's message; for a key given twice, which it does not name, the key and its lines."""
    if "overwrite" in str(error) or "twice" in str(error):
        lines: dict[KeyPath, int] = {}
        for keys, number in _toml_keys(text):
            if keys in lines:
                return f"the key {'.'.join(keys)} is given twice, in lines {lines[keys]} and {number}"
            lines[keys] = number
    return reason(error)
