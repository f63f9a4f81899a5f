"""One source of settings, flags, environment or file, as a layer: path → value and where it was given."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from llmkit.config.combined import COMBINED, expand_combined
from llmkit.config.files import ConfigFile
from llmkit.config.flags import ENV_PREFIX, flags_by_key, flat_names, section_types
from llmkit.config.keys import (
    OPTIONS,
    Path,
    display,
    is_table,
    kind_names,
    resolve_field,
    resolve_flat,
    resolve_key,
    resolve_kind,
)
from llmkit.config.values import parse_literal, parse_text, split_setting
from llmkit.errors import ConfigError, shown

Where = Callable[[tuple[str, ...]], str]


@dataclass(frozen=True)
class Given:
    """A value and its source in words: `file engine.toml:3`, `env LLMKIT_DTYPE`, `flag --dtype`."""

    value: Any
    source: str


@dataclass
class Layer:
    """Settings of one source. The same setting may be given only once, however it is spelled."""

    given: dict[Path, Given] = field(default_factory=dict)

    def add(self, path: Path, value: Any, source: str) -> None:
        """Add a setting; a table is taken apart, so that sources merge key by key.

        Raises ConfigError if the setting is there already."""
        if path[0] in COMBINED:
            for target, item in expand_combined(path[0], value, source):
                self.add(target, item, source)
            return None
        if path == OPTIONS:
            return self._add_all_options(value, source)
        if is_table(".".join(path)):
            for key, item in _mapping(value, display(path), source).items():
                self.add((*path, key), item, source)
            return None
        if path in self.given:
            raise ConfigError(f"{display(path)} is given twice: {self.given[path].source} and {source}.")
        self.given[path] = Given(value, source)
        return None

    def _add_all_options(self, value: Any, source: str) -> None:
        for kind, plugins in _mapping(value, "plugins.options", source).items():
            self.add_options(resolve_kind(kind), plugins, lambda _: source, ())

    def add_options(self, kind: str, plugins: Any, where: Where, keys: tuple[str, ...]) -> None:
        """Options of the plugins of `kind`: name → option → value, found under `keys` of the source."""
        for name, options in _mapping(plugins, f"plugins.{kind}", where(keys)).items():
            inner = (*keys, name)
            for option, value in _mapping(options, f"plugins.{kind}.{name}", where(inner)).items():
                self.add((*OPTIONS, kind, name, option), value, where((*inner, option)))


def file_layer(file: ConfigFile) -> Layer:
    """The settings of a file. Raises ConfigError for keys that do not exist."""
    return _tree_layer(file.values, lambda keys: f"file {file.where(keys)}")


def env_layer(env: Mapping[str, str]) -> tuple[Layer, list[str]]:
    """The settings among environment variables, `LLMKIT_SECTION__FIELD` or `LLMKIT_FLAG`, and warnings.

    An empty variable is not set. A variable with two underscores that names no setting is an error. Others that
    start with LLMKIT_ are left alone, as plugins and orchestrators (Kubernetes sets LLMKIT_SERVICE_HOST for a service
    called llmkit, and LLMKIT_PORT to the address of it) have theirs; one that is nearly the name of a setting is a
    warning.
    """
    layer, warnings = Layer(), list[str]()
    for name, text in sorted(env.items()):
        if not name.startswith(ENV_PREFIX) or not text or _is_service_address(name, text):
            continue
        key = name.removeprefix(ENV_PREFIX).lower()
        section = key.partition("__")[0]
        if "__" in key and (section in section_types() or section in kind_names()):
            path = _environment_path(key, name)
        elif key in flat_names():
            path = resolve_flat(key, f" (from {name})")
        else:
            near = difflib.get_close_matches(key, flat_names(), n=1, cutoff=0.85)
            if near:
                warnings.append(f"{name} is no setting; did you mean {ENV_PREFIX}{near[0].upper()}?")
            continue
        layer.add(path, _from_text(path, text), f"env {name}")
    return layer, warnings


def _is_service_address(name: str, text: str) -> bool:
    return name == f"{ENV_PREFIX}PORT" and text.startswith(("tcp://", "udp://", "sctp://"))


def flag_layer(flags: Mapping[str, Any], settings: Iterable[str], origin: str) -> Layer:
    """Values by dotted or flat key, as flags or arguments, and `KEY=VALUE` texts of `--set`. None: not given."""
    layer = Layer()

    def where(keys: tuple[str, ...]) -> str:
        return f"{origin} {_flag_name(keys, flags.get(keys[0])) if origin == 'flag' else '.'.join(keys)}"

    for key, value in flags.items():
        if value is None:
            continue
        plain = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        if "." in key:
            path = resolve_key(key)
            layer.add(path, _from_text(path, plain), where((key,)))
        else:
            _add_top(layer, key, plain, where)
    for setting in settings:
        key, text = split_setting(setting)
        path = resolve_key(key)
        layer.add(path, _from_text(path, text), f"flag --set {key}")
    return layer


def _flag_name(keys: tuple[str, ...], value: Any) -> str:
    """The flag of a key, the key itself if it has none or does not exist (its error is raised elsewhere)."""
    text = ".".join(keys).replace("-", "_")
    flag = flags_by_key().get(text) or flags_by_key().get("".join(flat_names().get(text, ())))
    if flag is None or not flag.name:
        return ".".join(keys)
    return flag.negative if flag.negative and value is False else flag.name


def _tree_layer(values: Mapping[str, Any], where: Where) -> Layer:
    layer = Layer()
    for key, value in values.items():
        _add_top(layer, key, value, where)
    return layer


def _add_top(layer: Layer, key: str, value: Any, where: Where) -> None:
    """A top-level key: a section with its fields, or a flat key. `scheduler: priority` is the flag `--scheduler`."""
    name = key.replace("-", "_")
    is_section = name in section_types()
    if is_section and isinstance(value, Mapping):
        for field_name, item in _mapping(value, key, where((key,))).items():
            _add_field(layer, key, name, field_name, item, where)
    elif is_section and value is None:
        return
    elif is_section and name not in flat_names():
        raise ConfigError(f"{key} ({where((key,))}) must be a table of settings, not {shown(value)}.")
    else:
        path = resolve_flat(key, f" ({where((key,))})")
        layer.add(path, _from_text(path, value), where((key,)))


def _add_field(layer: Layer, key: str, section: str, name: str, value: Any, where: Where) -> None:
    keys = (key, name)
    if section == "plugins" and name in kind_names():
        layer.add_options(name, value, where, keys)
        return
    if section == "plugins" and isinstance(value, Mapping) and name != "options":
        resolve_kind(name, f" ({where(keys)})")
    path = resolve_field(section, name, f" ({where(keys)})")
    if path == OPTIONS:
        for kind, plugins in _mapping(value, "plugins.options", where(keys)).items():
            layer.add_options(resolve_kind(kind), plugins, where, (*keys, kind))
    elif is_table(".".join(path)):
        for inner, item in _mapping(_from_text(path, value), display(path), where(keys)).items():
            layer.add((*path, inner), item, where((*keys, inner)))
    else:
        layer.add(path, _from_text(path, value), where(keys))


def _environment_path(key: str, name: str) -> Path:
    try:
        return resolve_key(key.replace("__", "."))
    except ConfigError as error:
        raise ConfigError(f"{name} sets nothing: {error.message}", hint=error.hint) from error


def _from_text(path: Path, value: Any) -> Any:
    """Text is converted as its setting wants it; an option's type is not known here, so it is read as a literal."""
    if not isinstance(value, str):
        return value
    flag = flags_by_key().get(".".join(path))
    return parse_text(flag, value) if flag else parse_literal(value)


def _mapping(value: Any, key: str, source: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} ({source}) must be a table, not {shown(value)}.")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"The keys of {key} ({source}) must be text; {shown(name)} is not.")
    return value
