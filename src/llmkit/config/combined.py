"""Flags that are not settings of their own but set several at once, in the form that other engines have made usual."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llmkit.errors import ConfigError, shown

Expansion = Iterator[tuple[tuple[str, ...], Any]]
"""Paths of settings, and their values."""

OPTIONS = ("plugins", "options")

_ROLES = {"kv_both": "both", "kv_producer": "producer", "kv_consumer": "consumer"}
_TRANSFER_KEYS = ("kv_connector", "kv_role", "kv_connector_extra_config", "kv_load_failure_policy")
_EVENT_SWITCHES = ("publisher", "enable_kv_cache_events")


@dataclass(frozen=True)
class CombinedFlag:
    """key: its name in a file and, with LLMKIT_ before it, in the environment; the flag is the same with dashes. It
    takes a JSON object. expand: from that to settings; raises ConfigError for what makes no sense."""

    key: str
    description: str
    expand: Callable[[Mapping[str, Any]], Expansion]

    @property
    def name(self) -> str:
        return "--" + self.key.replace("_", "-")


def expand_combined(key: str, value: Any, source: str) -> Expansion:
    """The settings that a combined flag sets. Raises ConfigError saying where the flag was given."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} ({source}) must be a JSON object, not {shown(value)}.")
    try:
        yield from COMBINED[key].expand(value)
    except ConfigError as error:
        raise ConfigError(f"{key} ({source}): {error.message}", hint=error.hint) from None


def _transfer(value: Mapping[str, Any]) -> Expansion:
    _check_keys(value, _TRANSFER_KEYS)
    name = value.get("kv_connector")
    if not isinstance(name, str) or not name:
        raise ConfigError("kv_connector must be the name of a connector.", hint="See `llmkit plugins list connector`.")
    yield ("connector", "name"), name
    role = value.get("kv_role", "kv_both")
    if role not in _ROLES:
        raise ConfigError(f"kv_role must be one of {', '.join(_ROLES)}; it is {shown(role)}.")
    yield ("connector", "role"), _ROLES[role]
    if "kv_load_failure_policy" in value:
        yield ("connector", "load_failure_policy"), value["kv_load_failure_policy"]
    options = value.get("kv_connector_extra_config") or {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"kv_connector_extra_config must be an object, not {shown(options)}.")
    for option, item in options.items():
        yield (*OPTIONS, "connector", name, str(option)), item


def _events(value: Mapping[str, Any]) -> Expansion:
    publisher = value.get("publisher", "zmq")
    if not isinstance(publisher, str) or not publisher:
        raise ConfigError(f'publisher must be a name such as "zmq", or "null"; it is {shown(publisher)}.')
    if publisher == "null" or value.get("enable_kv_cache_events") is False:
        return
    yield ("kv_cache", "event_publisher"), publisher
    for option, item in value.items():
        if option not in _EVENT_SWITCHES:
            yield (*OPTIONS, "extension", publisher_extension(publisher), str(option)), item


def publisher_extension(publisher: str) -> str:
    """Name of the extension that `kv_cache.event_publisher` means."""
    return f"kv-events-{publisher}"


def _check_keys(value: Mapping[str, Any], valid: tuple[str, ...]) -> None:
    unknown = [str(key) for key in value if key not in valid]
    if unknown:
        raise ConfigError(f"there is no key {', '.join(unknown)}. Valid: {', '.join(valid)}.")


COMBINED: dict[str, CombinedFlag] = {
    flag.key: flag
    for flag in (
        CombinedFlag(
            "kv_transfer_config",
            "Connector as one JSON object: kv_connector (its name), kv_role (kv_both, kv_producer, kv_consumer), "
            "kv_connector_extra_config (its options), kv_load_failure_policy (recompute, fail).",
            _transfer,
        ),
        CombinedFlag(
            "kv_events_config",
            "Publishing of KV cache events as one JSON object: publisher (zmq), and its options, such as endpoint, "
            "replay_endpoint and topic.",
            _events,
        ),
    )
}
"""Every combined flag, by key."""
