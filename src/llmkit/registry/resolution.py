"""A choice in the configuration → the one plugin it means."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Sequence

from llmkit.errors import PluginChoiceError
from llmkit.registry.discovery import missing_builtins
from llmkit.registry.policy import PluginPolicy, canonical
from llmkit.registry.rows import FROM_PATH, PluginRow


def resolve_choice(kind: str, choice: str, rows: Sequence[PluginRow], policy: PluginPolicy) -> PluginRow:
    """The row of `kind` that `choice` means: a name, `distribution:name`, or the path `module:attribute`.

    `rows` are those of the kind, with their states. Raises PluginChoiceError if there is none, if several distributions
    offer the name, or if it was switched off.
    """
    named = [row for row in rows if row.name == choice]
    left, colon, right = choice.partition(":")
    if colon and not named:
        named = [row for row in rows if canonical(row.distribution) == canonical(left) and row.name == right]
        if not named and not _is_module(left):
            raise _unknown(kind, choice, rows)
        if not named:
            return _by_path(kind, choice, rows, policy)
    active = [row for row in named if row.state != "disabled"]
    if len(active) > 1:
        raise PluginChoiceError(conflict_reason(active), hint=f"Write {' or '.join(row.qualified for row in active)}.")
    if active:
        return active[0]
    if named:
        raise _refused(named[0], named[0].reason or "it is disabled", "Enable it, or choose another one.")
    raise _unknown(kind, choice, rows)


def conflict_reason(rows: Sequence[PluginRow]) -> str:
    """The sentence that names every distribution offering the same kind and name."""
    offers = " and ".join(f"{row.origin} ({row.value})" for row in rows)
    return f"The {rows[0].kind} plugin {rows[0].name!r} is offered more than once: by {offers}."


def _is_module(name: str) -> bool:
    try:
        return all(map(str.isidentifier, name.split("."))) and importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        # A parent package that cannot be imported: loading will say why.
        return True


def _by_path(kind: str, choice: str, rows: Sequence[PluginRow], policy: PluginPolicy) -> PluginRow:
    row = PluginRow(kind, choice, choice, FROM_PATH, "")
    packages = {other.value.partition(":")[0].partition(".")[0] for other in rows if other.builtin}
    if policy.safe_mode and choice.partition(":")[0].partition(".")[0] not in packages:
        raise _refused(row, "safe mode allows only llmkit's own plugins", "Start without safe mode to use it.")
    return row


def _refused(row: PluginRow, reason: str, hint: str) -> PluginChoiceError:
    error = row.error(reason, hint)
    return PluginChoiceError(error.message, hint=error.hint)


def _unknown(kind: str, choice: str, rows: Sequence[PluginRow]) -> PluginChoiceError:
    names = sorted({row.name for row in rows if row.state != "disabled"})
    near = difflib.get_close_matches(choice, names, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    known = f"Installed: {', '.join(names)}." if names else "None is installed."
    hint = known if any(row.builtin for row in rows) or names else f"{known} {missing_builtins()}"
    return PluginChoiceError(f"There is no {kind} plugin {choice!r}.{guess}", hint=hint)
