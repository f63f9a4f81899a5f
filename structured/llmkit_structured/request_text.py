"""What a request for a grammar means as a regular language, for the engines that know nothing else."""

from __future__ import annotations

import json

from llmkit.errors import InvalidRequestError
from llmkit.hookspecs.structured import GrammarRequest
from llmkit_structured import json_text
from llmkit_structured.json_text import Layout
from llmkit_structured.regex_syntax import MalformedRegex, UnsupportedRegex, whole
from llmkit_structured.regex_tree import EMPTY, NOTHING, Tree, alphabet_misses, chars, choice, sequence, text
from llmkit_structured.schema_form import Object
from llmkit_structured.schema_reader import ReadSchema, read_schema
from llmkit_structured.schema_refusal import UnsupportedSchema

PARAM = "structured_outputs"
BLANKS = chars([(9, 10), (13, 13), (32, 32)])


class UnsupportedRequest(ValueError):
    """Why an engine cannot express a request, as a sentence."""


def invalid(problems: list[str]) -> InvalidRequestError:
    """The error for a request that `problems` speak against."""
    return InvalidRequestError(" ".join(problems), param=PARAM)


def choices(request: GrammarRequest) -> list[str]:
    """The texts of a request of kind choice. Raises UnsupportedRequest."""
    found = json.loads(request.source)
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise UnsupportedRequest("choice must be a list of texts, not empty.")
    return found


def regex_tree(source: str, name: str = "regex") -> Tree:
    """The texts that a request's regular expression matches as a whole. Raises UnsupportedRequest, also if there are
    none, and InvalidRequestError for what is no regular expression."""
    try:
        tree = whole(source)
    except MalformedRegex as error:
        raise invalid([f"{PARAM}: {name} is not a regular expression: {error}."]) from None
    except UnsupportedRegex as error:
        raise UnsupportedRequest(f"{name} has {error}, which cannot be expressed.") from None
    if choice([tree]) == NOTHING:
        raise UnsupportedRequest(f"{name} matches no text at all.")
    return tree


def schema_of(request: GrammarRequest) -> ReadSchema:
    """The schema of a request for JSON. Raises UnsupportedRequest."""
    if request.kind == "json_object":
        return ReadSchema(Object(), {})
    try:
        return read_schema(request.source)
    except UnsupportedSchema as error:
        raise UnsupportedRequest(f"The JSON schema cannot be expressed: {error}.") from None


def blanks_tree(request: GrammarRequest) -> Tree | None:
    """What `whitespace_pattern` allows between the tokens of JSON; None without one. Raises UnsupportedRequest."""
    if request.whitespace_pattern is None:
        return None
    tree = regex_tree(request.whitespace_pattern, "whitespace_pattern")
    if alphabet_misses(tree, BLANKS):
        raise UnsupportedRequest("whitespace_pattern allows more than spaces, tabs and line ends.")
    return choice([EMPTY, tree])


def spacing(request: GrammarRequest) -> Layout:
    """The layout of JSON for an engine that does not count blanks: the request's own, else on one line with at most
    one space after colon and comma. Raises UnsupportedRequest."""
    tree = blanks_tree(request)
    if tree is not None:
        return json_text.layout(tree)
    if request.max_whitespace == 0:
        return Layout(EMPTY, text(":"), text(","))
    return json_text.FIXED


def tree_of(request: GrammarRequest, max_depth: int) -> Tree:
    """All texts that the request allows. Raises UnsupportedRequest."""
    if request.kind == "choice":
        return choice(sequence([text(one)]) for one in choices(request))
    if request.kind == "regex":
        return regex_tree(request.source)
    if request.kind in ("json_schema", "json_object"):
        schema, layout = schema_of(request), spacing(request)
        try:
            return json_text.json_text(schema, max_depth, layout)
        except UnsupportedSchema as error:
            raise UnsupportedRequest(f"The JSON schema cannot be expressed: {error}.") from None
    raise UnsupportedRequest(
        f"{request.kind} is not supported, only JSON schemas, regular expressions and choices are."
    )
