"""What of a JSON schema a grammar engine enforces, told as a table; everything else is a problem, named.

A schema's author relies on every keyword. Most grammar libraries pass over some of them without a word, and the answer
then breaks the schema; so an engine says what it enforces, and whatever it does not is refused before it is compiled.
Keywords that forbid nothing by the specification (`title`, `default`, unknown ones) are never a problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from llmkit.errors import shown
from llmkit.grammars import schema_keywords
from llmkit.grammars.schema_document import SchemaDocument, SchemaNode

MAX_PROBLEMS = 5

Condition = Callable[[SchemaNode], str | None]
"""Why a keyword is not enforced at this node, as the end of a sentence ("is not enforced beside maxLength"); None if it
is."""


@dataclass(frozen=True)
class EnforcedKeywords:
    """What an engine enforces.

    keywords: those that it enforces wherever they stand. conditions: keyword → under which circumstances it does not;
    such a keyword need not be in `keywords`. formats: values of `format` that it enforces; a format that every text
    has is never a problem. nodes: further conditions, asked for every subschema that is an object, whatever its
    keywords.
    """

    keywords: frozenset[str]
    conditions: Mapping[str, Condition] = field(default_factory=dict)
    formats: frozenset[str] = frozenset()
    nodes: tuple[Condition, ...] = ()

    def problems(self, node: SchemaNode) -> list[str]:
        """What of one subschema is not enforced, a sentence each."""
        schema = node.schema
        if isinstance(schema, bool):
            return []
        found = [self._problem(node, keyword) for keyword in schema]
        found += [f"The schema at {node.pointer} {why}." for ask in self.nodes if (why := ask(node)) is not None]
        return [sentence for sentence in found if sentence is not None]

    def _problem(self, node: SchemaNode, keyword: str) -> str | None:
        if keyword not in schema_keywords.ASSERTIONS or not node.has_effect(keyword):
            return None
        condition = self.conditions.get(keyword)
        if condition is not None:
            why = condition(node)
        elif keyword == "format":
            why = self._format_problem(node)
        else:
            why = None if keyword in self.keywords else "is not enforced"
        return None if why is None else f"{keyword} at {node.pointer} {why}."

    def _format_problem(self, node: SchemaNode) -> str | None:
        assert isinstance(node.schema, dict)
        name = node.schema["format"]
        if name in self.formats or name in schema_keywords.HARMLESS_FORMATS:
            return None
        known = f"; enforced are {', '.join(sorted(self.formats))}" if self.formats else ""
        return f"is {shown(name)}, which is not enforced{known}"


def schema_problems(source: str, enforced: EnforcedKeywords) -> list[str]:
    """What of the JSON schema `source` an engine does not enforce: at most MAX_PROBLEMS sentences, each with the
    keyword and a pointer to where it stands. Raises InvalidRequestError for a schema that is malformed."""
    found: list[str] = []
    for node in SchemaDocument.parse(source).nodes():
        found += enforced.problems(node)
        if len(found) >= MAX_PROBLEMS:
            break
    return found[:MAX_PROBLEMS]


def check_schema(source: str) -> None:
    """Raise InvalidRequestError if `source` is no JSON schema, whatever engine it may be for."""
    for _ in SchemaDocument.parse(source).nodes():
        pass
