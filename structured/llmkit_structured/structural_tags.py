"""Structural tags: free text in which a trigger must begin one of several tags, each of which holds JSON.

Both forms in use are read: `structures` with `triggers`, and `format` of type `triggered_tags`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from llmkit_structured.request_text import UnsupportedRequest


@dataclass(frozen=True)
class Tag:
    """`begin`, a JSON value of `schema` (JSON text), `end`. trigger: a beginning of `begin`, after which it must
    follow."""

    trigger: str
    begin: str
    schema: str
    end: str


def read_tags(source: str) -> list[Tag]:
    """The tags of a request of kind structural_tag. Raises UnsupportedRequest."""
    given = json.loads(source)
    if not isinstance(given, dict):
        raise UnsupportedRequest("structural_tag must be an object.")
    if "format" in given:
        return _from_format(given["format"])
    structures, triggers = given.get("structures"), given.get("triggers")
    if not isinstance(structures, list):
        raise UnsupportedRequest("structural_tag needs a list `structures` and a list `triggers`, or `format`.")
    contents = [(one, one.get("schema", True) if isinstance(one, dict) else None) for one in structures]
    return _tags(contents, triggers)


def _from_format(given: Any) -> list[Tag]:
    kind = given.get("type") if isinstance(given, dict) else None
    if kind != "triggered_tags":
        raise UnsupportedRequest(
            f"structural_tag.format of type {kind!r:.40} is not supported, only triggered_tags is."
        )
    for flag in ("at_least_one", "stop_after_first", "excludes"):
        if given.get(flag):
            raise UnsupportedRequest(f"structural_tag.format with {flag} is not supported.")
    tags = given.get("tags")
    if not isinstance(tags, list):
        raise UnsupportedRequest("structural_tag.format needs a list `tags`.")
    contents = []
    for tag in tags:
        content = tag.get("content") if isinstance(tag, dict) else None
        if not isinstance(content, dict) or content.get("type") != "json_schema":
            raise UnsupportedRequest(
                "structural_tag.format: only tags whose content is of type json_schema are supported."
            )
        contents.append((tag, content.get("json_schema", True)))
    return _tags(contents, given.get("triggers"))


def _tags(contents: list[tuple[Any, Any]], triggers: Any) -> list[Tag]:
    if not contents or not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise UnsupportedRequest("structural_tag needs at least one tag, and `triggers`, a list of texts.")
    tags = []
    for tag, schema in contents:
        begin, end = (tag.get("begin"), tag.get("end")) if isinstance(tag, dict) else (None, None)
        if not isinstance(begin, str) or not isinstance(end, str):
            raise UnsupportedRequest("Every structural tag needs the texts `begin` and `end`.")
        found = [trigger for trigger in triggers if begin.startswith(trigger)]
        if len(found) != 1:
            raise UnsupportedRequest(f"The structural tag {begin!r:.60} must begin with exactly one of the triggers.")
        tags.append(Tag(found[0], begin, json.dumps(schema), end))
    return tags
