"""Names of settings as users write them → the one path by which the configuration knows them.

A path is a tuple: (section, field); (field,) at the top; ("model", "overrides", key) for a key of a table;
("plugins", "options", kind, name, option) for an option of a plugin, whose name may itself hold dots.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from llmkit.config.flags import all_flags, flags_by_key, flat_names, section_types
from llmkit.errors import ConfigError, shown
from llmkit.hookspecs.kinds import KINDS

Path = tuple[str, ...]

OPTIONS: Path = ("plugins", "options")


def resolve_key(text: str) -> Path:
    """The path of a dotted or flat key; dashes and underscores are the same in section and field names.

    `kind.name.option` and `plugins.kind.name.option` are options of plugins. Raises ConfigError with the valid keys.
    """
    first, *rest = text.split(".")
    if not rest:
        return resolve_flat(text)
    if _words(first) == "plugins" and len(rest) > 1:
        return _option_path(rest[1:] if _words(rest[0]) == "options" else rest, text)
    section = _words(first)
    if section in section_types() and (len(rest) == 1 or is_table(f"{section}.{_words(rest[0])}")):
        return (*resolve_field(section, rest[0]), *((".".join(rest[1:]),) if len(rest) > 1 else ()))
    if first in kind_names() and len(rest) > 1:
        return _option_path([first, *rest], text)
    known = [*section_types(), *kind_names()]
    raise ConfigError(f"Unknown key {shown(text)}: {unknown(first, known, 'section or plugin kind')}")


def resolve_flat(text: str, where: str = "") -> Path:
    """The path of a key without section; `where` says where it was. Raises ConfigError if unknown or ambiguous."""
    keys = flat_names().get(_words(text), ())
    if len(keys) == 1:
        return tuple(keys[0].split("."))
    if keys:
        raise ConfigError(f"The key {shown(text)}{where} could mean {' or '.join(keys)}.", hint="Write the full name.")
    valid = [*section_types(), *(flag.flat_name for flag in all_flags() if flag.name)]
    raise ConfigError(f"Unknown key {shown(text)}{where}: {unknown(_words(text), valid, 'setting')}")


def resolve_field(section: str, field: str, where: str = "") -> Path:
    """The path of `field` in `section`, which must exist. Raises ConfigError listing the section's keys."""
    name = _words(field)
    fields = section_types()[section].model_fields
    if name not in fields:
        raise ConfigError(f"Unknown key {section}.{field}{where}: {unknown(name, fields, 'setting')}")
    return (section, name)


def is_table(key: str) -> bool:
    """Whether the setting is a table whose keys are merged one by one over the sources."""
    flag = flags_by_key().get(key)
    return flag is not None and flag.type == "table"


def kind_names() -> tuple[str, ...]:
    """The plugin kinds."""
    return tuple(kind.name for kind in KINDS)


def resolve_kind(name: str, where: str = "") -> str:
    """`name` if it is a plugin kind. Raises ConfigError listing the kinds."""
    if name not in kind_names():
        raise ConfigError(f"Unknown key plugins.{name}{where}: {unknown(name, kind_names(), 'plugin kind')}")
    return name


def display(path: Path) -> str:
    """How a path is shown: `plugins.scheduler.priority.aging_s` for an option of a plugin."""
    return ".".join(("plugins", *path[2:]) if path[:2] == OPTIONS and len(path) > 2 else path)


def unknown(name: str, valid: Iterable[str], what: str) -> str:
    """ "there is no such WHAT" with the nearest valid name and all valid names."""
    names = list(dict.fromkeys(valid))
    near = difflib.get_close_matches(name, names, n=1)
    guess = f" Did you mean {near[0]}?" if near else ""
    return f"there is no such {what}.{guess} Valid: {', '.join(names)}."


def _option_path(parts: list[str], text: str) -> Path:
    """(kind, name, option) out of dotted parts. A name given as `module:attribute` may hold dots."""
    kind = resolve_kind(parts[0])
    if len(parts) < 3:
        raise ConfigError(f"Unknown key {shown(text)}: an option of a plugin is written {kind}.NAME.OPTION.")
    *name, option = parts[1:]
    return (*OPTIONS, kind, ".".join(name), option)


def _words(text: str) -> str:
    return text.replace("-", "_")
