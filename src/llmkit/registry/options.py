"""Options of a plugin: checked with its own model, errors in the user's terms."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llmkit.errors import ConfigError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from llmkit.registry.loading import LoadedPlugin


def validated_options(plugin: LoadedPlugin, given: Mapping[str, Any]) -> BaseModel | None:
    """An instance of `info.options` with what the user gave; None if the plugin has no options.

    Dashes and underscores are the same in names. Raises ConfigError naming the option, its key and the valid ones.
    """
    model = plugin.info.options
    prefix = f"plugins.{plugin.row.kind}.{plugin.row.name}"
    if model is None:
        if given:
            raise ConfigError(f"{prefix}.{next(iter(given))} is set, but this plugin takes no options.")
        return None
    from pydantic import ValidationError

    try:
        return model.model_validate(_known(prefix, model, given))
    except ValidationError as error:
        details = error.errors()[0]
        key = ".".join([prefix, *map(str, details["loc"])])
        raise ConfigError(f"{key}: {details['msg']}; it is {details['input']!r}.") from None


def _known(prefix: str, model: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """The options under their proper names. Unknown ones are refused here, as a model may be lax about them."""
    names = set(model.model_fields) | {f.alias for f in model.model_fields.values() if f.alias}
    options: dict[str, Any] = {}
    for key, value in given.items():
        name = key if key in names else key.replace("-", "_")
        if name not in names and model.model_config.get("extra") != "allow":
            near = difflib.get_close_matches(name, names, n=1)
            guess = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"Unknown option {prefix}.{key}.{guess} Valid: {', '.join(sorted(names)) or 'none'}.")
        if name in options:
            raise ConfigError(f"The option {prefix}.{name} is given twice.")
        options[name] = value
    return options
