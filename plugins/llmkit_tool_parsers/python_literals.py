"""Python literals → JSON texts. They are parsed, never evaluated."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from llmkit_tool_parsers.marks import quoted

MAX_CHARS = 1_000_000
MAX_DEPTH = 32

_JSON_NUMBER = re.compile(r"(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_JSON_NAMES = {"true": "true", "false": "false", "null": "null"}


def json_of_literal(source: str) -> str | None:
    """The JSON text of a literal: texts, numbers, lists, tuples, dicts with texts as keys, True, False, None, and
    JSON's true, false, null. Numbers stay as they are written where JSON has that form. None for anything else."""
    if len(source) > MAX_CHARS or not source.strip():
        return None
    source = source.strip().replace("\r\n", "\n").replace("\r", "\n")
    try:
        with warnings.catch_warnings():
            # An unknown escape in a text is a warning of Python's about source code; here it is a backslash.
            warnings.simplefilter("ignore")
            node = ast.parse(f"({source})", mode="eval").body
        return _Writer(source).json(node, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None


class _Writer:
    def __init__(self, source: str) -> None:
        # Places in a syntax tree are lines and bytes.
        self._lines = [line.encode() for line in f"({source})".split("\n")]

    def json(self, node: ast.expr, depth: int) -> str:
        """The JSON text of `node`. Raises ValueError if it is no literal."""
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        match node:
            case ast.Constant(value=value):
                return self._constant(value, node)
            case ast.Name(id=name) if name in _JSON_NAMES:
                return name
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)) if type(value) in (int, float):
                return f"-{self._constant(value, node.operand)}"
            case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=value)) if type(value) in (int, float):
                return self._constant(value, node.operand)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return f"[{', '.join(self.json(one, depth + 1) for one in elements)}]"
            case ast.Dict(keys=keys, values=values):
                members = zip(keys, values, strict=True)
                return f"{{{', '.join(f'{_key(key)}: {self.json(value, depth + 1)}' for key, value in members)}}}"
        raise ValueError("no literal")

    def _constant(self, value: Any, node: ast.expr) -> str:
        if value is None or isinstance(value, bool):
            return json.dumps(value)
        if isinstance(value, str):
            return _text(value, self._written(node))
        if isinstance(value, (int, float)):
            written = self._written(node)
            return written if _JSON_NUMBER.fullmatch(written) else json.dumps(value, allow_nan=False)
        raise ValueError("no value of JSON")

    def _written(self, node: ast.expr) -> str:
        """The source of a constant on one line; "" of a longer one."""
        if node.end_lineno != node.lineno:
            return ""
        return self._lines[node.lineno - 1][node.col_offset : node.end_col_offset].decode()


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _text(node.value, "")
    raise ValueError("a key that is no text")


def _text(value: str, written: str) -> str:
    """A text as JSON. What is JSON already is meant as such, where the notations differ (`\\/`, surrogate pairs)."""
    if written.startswith('"'):
        try:
            found = json.loads(written)
            if isinstance(found, str):
                return quoted(_whole(found))
        except ValueError:
            pass
    return quoted(_whole(value))


def _whole(text: str) -> str:
    """With surrogate pairs joined, and halves of such replaced."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
