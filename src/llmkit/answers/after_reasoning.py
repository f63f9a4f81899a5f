"""A constraint on an answer, made to allow free text before it."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from llmkit.errors import InvalidRequestError
from llmkit.requests.structured_outputs import StructuredOutputs


def after_block(answer: StructuredOutputs, begin: str, end: str, *, optional: bool = False) -> StructuredOutputs:
    """`answer` after a block of any text from `begin` (which may be empty) to `end` and up to two line breaks.
    optional: the block may be left out.

    Raises InvalidRequestError for a structural tag in the older form, which cannot stand within another one.
    """
    block = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}
    gap = {"type": "or", "elements": [{"type": "const_string", "value": text} for text in ("\n\n", "\n")]}
    free = {"type": "sequence", "elements": [block, {"type": "optional", "content": gap}]}
    first = {"type": "optional", "content": free} if optional else free
    form = {"type": "sequence", "elements": [first, _format(answer)]}
    tag = {"type": "structural_tag", "format": form}
    return StructuredOutputs(
        structural_tag=tag,
        disable_any_whitespace=answer.disable_any_whitespace,
        whitespace_pattern=answer.whitespace_pattern,
    )


def _format(answer: StructuredOutputs) -> dict[str, Any]:
    """The constraint as a part of a structural tag."""
    value = msgspec.structs.asdict(answer)[answer.constraint]
    match answer.constraint:
        case "json":
            return {"type": "json_schema", "json_schema": json.loads(value) if isinstance(value, str) else value}
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex":
            return {"type": "regex", "pattern": value}
        case "choice":
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in value]}
        case "grammar":
            return {"type": "grammar", "grammar": value}
    tag = json.loads(value) if isinstance(value, str) else value
    if not isinstance(tag, dict) or "format" not in tag:
        raise InvalidRequestError(
            "structural_tag must have a `format` for a model that reasons before it answers.",
            param="structured_outputs",
        )
    form: dict[str, Any] = tag["format"]
    return form
