"""The two pluggy markers. Plugin authors import `hookimpl` from `llmkit.hookspecs`."""

from __future__ import annotations

import pluggy

PROJECT_NAME = "llmkit"

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
