"""The whole extension API: one short module per plugin kind, each a contract and its hook specification."""

from llmkit.hookspecs.markers import hookimpl, hookspec
from llmkit.hookspecs.plugin import Environment, PluginInfo

__all__ = ["Environment", "PluginInfo", "hookimpl", "hookspec"]
