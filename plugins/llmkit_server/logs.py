"""Where the server's log goes, and what is in it."""

from __future__ import annotations

import logging
import sys

from llmkit.config import EngineConfig
from llmkit.logs import formatter, set_level


def configure_logs(config: EngineConfig) -> None:
    """Log to stderr as `observability.log_format` says. `observability.log_level` is the level; lines about
    requests, which `server.access_log` and `observability.log_requests` switch, are shown at any."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(config.observability.log_format))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_level(config.observability.log_level)
    logging.getLogger("llmkit.server.access").setLevel(logging.INFO)
    logging.getLogger("llmkit.server.requests").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
