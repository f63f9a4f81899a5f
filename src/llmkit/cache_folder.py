"""Where llmkit keeps files between runs: fetched models, compiled kernels."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """$LLMKIT_CACHE, else `llmkit` in the platform's cache folder. It need not exist."""
    if chosen := os.environ.get("LLMKIT_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "llmkit"
