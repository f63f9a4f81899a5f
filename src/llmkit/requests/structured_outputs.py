"""The constraint that a request puts on its answer: exactly one of several kinds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from llmkit.errors import InvalidRequestError, shown
from llmkit.requests import validation

FIELD = "structured_outputs"
CONSTRAINTS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")

MAX_CHOICES = 4096
MAX_CHOICE_CHARS = 4096
MAX_CHOICES_TOTAL_CHARS = 2**20
MAX_SOURCE_CHARS = 1_000_000


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one constraint is set; the others are None (json_object: False).

    json: a JSON schema, as a mapping or as JSON text. json_object: any JSON object.
    regex: the whole text must match. choice: the text is one of these. grammar: EBNF or Lark text.
    structural_tag: a description as JSON text or mapping.
    The grammar engine compiles the source and refuses what it cannot express; here the form is checked.
    disable_any_whitespace, whitespace_pattern: what may stand between the tokens of JSON.
    """

    json: str | dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) not in (None, False)]
        # A schema of `False` is legal JSON schema but allows nothing at all.
        if self.json is False:
            raise InvalidRequestError("structured_outputs.json: false allows no answer.", param="structured_outputs")
        if len(given) != 1:
            found = ", ".join(given) if given else "none"
            raise InvalidRequestError(
                f"structured_outputs needs exactly one of {', '.join(CONSTRAINTS)}; got {found}.",
                param=FIELD,
            )
        validation.flag("structured_outputs.json_object", self.json_object)
        validation.flag("structured_outputs.disable_any_whitespace", self.disable_any_whitespace)
        for name, kinds in _TEXT_FIELDS.items():
            _check_text(name, getattr(self, name), kinds)
        if self.choice is not None:
            choices = validation.strings(
                "structured_outputs.choice", self.choice, MAX_CHOICES, MAX_CHOICE_CHARS, MAX_CHOICES_TOTAL_CHARS
            )
            if not choices:
                raise InvalidRequestError("structured_outputs.choice must not be empty.", param="structured_outputs")
            msgspec.structs.force_setattr(self, "choice", choices)

    @property
    def constraint(self) -> str:
        """Name of the one constraint that is set."""
        return next(name for name in CONSTRAINTS if getattr(self, name) not in (None, False))


_TEXT_FIELDS: dict[str, tuple[type, ...]] = {
    "json": (str, dict, bool),
    "regex": (str,),
    "grammar": (str,),
    "structural_tag": (str, dict),
    "whitespace_pattern": (str,),
}


def _check_text(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if value is None:
        return
    if not isinstance(value, kinds):
        wanted = " or ".join({str: "text", dict: "a mapping", bool: "true"}[kind] for kind in kinds)
        raise validation.refuse(f"structured_outputs.{name}", value, wanted)
    if isinstance(value, str) and not 0 < len(value) <= MAX_SOURCE_CHARS:
        raise InvalidRequestError(
            f"structured_outputs.{name} must have 1 to {MAX_SOURCE_CHARS} characters, got {len(value)}.",
            param=FIELD,
        )


def structured_outputs(value: StructuredOutputs | Mapping[str, Any] | None) -> StructuredOutputs | None:
    """The validated constraint from an object or a plain mapping. Raises InvalidRequestError."""
    if value is None or isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise validation.refuse("structured_outputs", value, f"a mapping with one of {', '.join(CONSTRAINTS)}")
    known = StructuredOutputs.__struct_fields__
    unknown = [key if isinstance(key, str) else shown(key) for key in value if key not in known]
    if unknown:
        raise InvalidRequestError(
            f"structured_outputs has no field {', '.join(unknown)}; known: {', '.join(known)}.",
            param=FIELD,
        )
    return StructuredOutputs(**value)
