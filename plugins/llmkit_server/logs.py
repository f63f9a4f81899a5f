"""The server's log: lines for people, or a JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time

from llmkit.config import EngineConfig

_FIELDS = ("request_id", "client", "method", "path", "status", "seconds")


class JsonFormatter(logging.Formatter):
    """time (UTC), level, logger, message, and what the record says of a request."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class LineFormatter(logging.Formatter):
    """One record never makes more lines than its exception needs: line breaks in messages are escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


def configure_logs(config: EngineConfig) -> None:
    """Log to stderr as `server.log_format` says. `observability.log_level` is the level; lines about requests, which
    `server.access_log` switches, are shown at any."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.server.log_format == "json" else LineFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("llmkit").setLevel(config.observability.log_level.upper())
    logging.getLogger("llmkit.server.access").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
