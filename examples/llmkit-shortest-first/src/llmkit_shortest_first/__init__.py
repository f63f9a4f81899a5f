"""The front door: what llmkit imports when `--scheduler shortest-first` is chosen."""

from __future__ import annotations

from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit_shortest_first.options import ShortestFirstOptions

info = PluginInfo(summary="shortest prompt first, with a limit on overtaking", options=ShortestFirstOptions)


@hookimpl
def llmkit_scheduler_policy(options: ShortestFirstOptions):
    from llmkit_shortest_first.policy import ShortestFirst

    return ShortestFirst(options.max_overtakes)
