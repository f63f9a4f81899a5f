"""Every setting under its three names: the dotted key, the command-line flag and the environment variable.

The command line makes its options from this table, the file and environment readers resolve names with it, and the
reference is printed from it, so a field added to a section appears in all of them.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from llmkit.config.combined import COMBINED
from llmkit.config.engine_config import EngineConfig
from llmkit.config.sections import Section
from llmkit.hookspecs.kinds import KINDS

ENV_PREFIX = "LLMKIT_"

FlagType = Literal["text", "integer", "number", "boolean", "list", "table"]

# Where the field's own name would be ambiguous or unclear on a command line; kinds bring their own flags.
_NAMES: dict[str, str] = {
    "model.model": "--model",
    "model.overrides": "--hf-overrides",
    "kv_cache.dtype": "--kv-cache-dtype",
    "kv_cache.memory_gib": "--kv-cache-memory-gib",
    "kv_cache.event_publisher": "--kv-event-publisher",
    "connector.role": "--connector-role",
    "connector.load_timeout_s": "--connector-load-timeout-s",
    "server.served_model_names": "--served-model-name",
    "server.api_keys": "--api-key",
    "plugins.auto": "--auto-plugins",
    "plugins.strict": "--strict-plugins",
    "plugins.disable": "--disable-plugins",
} | {kind.config_key: kind.flag for kind in KINDS if kind.config_key and kind.flag}

_SECRET = frozenset({"server.api_keys"})

# Options of plugins have no flag of their own: `--set KIND.NAME.OPTION=VALUE`.
_WITHOUT_FLAG = frozenset({"plugins.options"})


@dataclass(frozen=True)
class Flag:
    """One setting.

    key: dotted configuration key. name: the flag, empty if there is none. type: what a value looks like; "list" is a
    comma-separated or JSON list, "table" a JSON object. choices: the allowed words, if they are few. optional: whether
    it may be left open (null). allowed: the allowed values in words. plugin_kind: the kind of plugin it chooses.
    secret: its value is not to be shown.
    """

    key: str
    name: str
    type: FlagType
    choices: tuple[str, ...]
    optional: bool
    default: Any
    description: str
    allowed: str
    plugin_kind: str | None = None
    secret: bool = False

    @property
    def negative(self) -> str | None:
        """The flag that switches a boolean off; None for other types."""
        return f"--no-{self.name[2:]}" if self.type == "boolean" and self.name else None

    @property
    def flat_name(self) -> str:
        """The flag without dashes, as accepted at the top level of a file; empty if there is none."""
        return self.name[2:].replace("-", "_")

    @property
    def env(self) -> str:
        """The environment variable in its full form, `LLMKIT_SECTION__FIELD`."""
        return ENV_PREFIX + self.key.replace(".", "__").upper()

    @property
    def flat_env(self) -> str | None:
        """The short form of the environment variable, `LLMKIT_FLAG`."""
        return ENV_PREFIX + self.flat_name.upper() if self.name else None


def section_types() -> dict[str, type[Section]]:
    """Name → class of the sections of EngineConfig."""
    return {
        name: field.annotation
        for name, field in EngineConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    }


@cache
def all_flags() -> tuple[Flag, ...]:
    """Every setting, in the order of the sections."""
    return tuple(_flag(key, field) for key, field in _fields())


@cache
def combined_flags() -> tuple[Flag, ...]:
    """Flags that set several settings at once; their keys are no settings."""
    return tuple(
        Flag(flag.key, flag.name, "table", (), True, None, flag.description, "a JSON object")
        for flag in COMBINED.values()
    )


@cache
def flags_by_key() -> dict[str, Flag]:
    """Dotted key → setting, or combined flag."""
    return {flag.key: flag for flag in (*all_flags(), *combined_flags())}


@cache
def flat_names() -> dict[str, tuple[str, ...]]:
    """Flat name (with underscores) → dotted keys it may mean. Names of flags mean one; a bare field name that several
    sections have means several, and is refused as ambiguous."""
    names = {flag.flat_name: (flag.key,) for flag in (*all_flags(), *combined_flags()) if flag.name}
    by_field: dict[str, tuple[str, ...]] = {}
    for flag in all_flags():
        field = flag.key.rpartition(".")[2]
        by_field[field] = (*by_field.get(field, ()), flag.key)
    return by_field | names


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    sections = section_types()
    for name, field in EngineConfig.model_fields.items():
        if name in sections:
            yield from ((f"{name}.{inner}", info) for inner, info in sections[name].model_fields.items())
        else:
            yield name, field


def _flag(key: str, field: FieldInfo) -> Flag:
    annotations, optional = _alternatives(field.annotation)
    choices = tuple(str(word) for a in annotations if get_origin(a) is Literal for word in get_args(a))
    kind = _type_of(annotations)
    name = _NAMES.get(key, "--" + key.rpartition(".")[2].replace("_", "-"))
    return Flag(
        key=key,
        name="" if key in _WITHOUT_FLAG else name,
        type=kind,
        choices=choices,
        optional=optional,
        default=field.get_default(call_default_factory=True, validated_data={}),
        description=field.description or "",
        allowed=_allowed(kind, choices, field),
        plugin_kind=next((k.name for k in KINDS if k.config_key == key), None),
        secret=key in _SECRET,
    )


def _alternatives(annotation: Any) -> tuple[list[Any], bool]:
    """The members of a union, `Annotated` peeled off, and whether None is one of them."""
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    peeled = [get_args(m)[0] if hasattr(m, "__metadata__") else m for m in members]
    return [m for m in peeled if m is not type(None)], type(None) in peeled


def _type_of(annotations: list[Any]) -> FlagType:
    if bool in annotations:
        return "boolean"
    (annotation,) = annotations
    simple: dict[Any, FlagType] = {int: "integer", float: "number", tuple: "list", dict: "table"}
    return simple.get(get_origin(annotation) or annotation, "text")


def _allowed(kind: FlagType, choices: tuple[str, ...], field: FieldInfo) -> str:
    """What values the field takes, in words that complete "must be …"."""
    if choices:
        return ("true, false or " if kind == "boolean" else "one of ") + ", ".join(choices)
    words = {
        "text": "text",
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "list": "a list",
        "table": "a table of keys and values",
    }
    bounds = [bound for rule in field.metadata if (bound := _bound(rule))]
    return words[kind] + (", " + " and ".join(bounds) if bounds else "")


def _bound(rule: object) -> str:
    match rule:
        case Ge(ge=limit):
            return f"at least {limit}"
        case Gt(gt=limit):
            return f"above {limit}"
        case Le(le=limit):
            return f"at most {limit}"
        case Lt(lt=limit):
            return f"below {limit}"
        case _:
            return ""
