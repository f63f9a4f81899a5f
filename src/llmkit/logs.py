"""Formats of log lines, the same in every process: for people, or a JSON object a line."""

from __future__ import annotations

import json
import logging
import time
from typing import Literal

LogFormat = Literal["text", "json"]

START_LOGGER = "llmkit.start"
"""For the few lines that tell people why a start takes its time."""

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """time (UTC), level, logger, process id, message, and whatever else the record says (`extra`)."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LineFormatter(logging.Formatter):
    """One record never makes more lines than its exception needs: line breaks in messages are escaped."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


def set_level(level: str) -> None:
    """Show llmkit's records from `level` on. What a start is busy with is told unless only errors are wanted: nobody
    is to take a long start for a hang."""
    logging.getLogger("llmkit").setLevel(level.upper())
    logging.getLogger(START_LOGGER).setLevel(logging.ERROR if level == "error" else logging.INFO)


def formatter(log_format: LogFormat) -> logging.Formatter:
    """Writes records as `log_format` says."""
    return JsonFormatter() if log_format == "json" else LineFormatter()


def passed_on(line: str, pid: int, log_format: LogFormat) -> str:
    """A line that the process `pid` has written, as it is shown in this one's log. What is a JSON object stays it."""
    if log_format == "text":
        return f"[engine {pid}] {line}"
    if line.startswith("{") and line.endswith("}"):
        return line
    record = logging.makeLogRecord(
        {"name": "llmkit.engine.process.stderr", "levelname": "ERROR", "process": pid, "msg": "%s", "args": (line,)}
    )
    return JsonFormatter().format(record)
