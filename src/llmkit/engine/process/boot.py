"""What the parent gives a new engine process on its standard input, and how the process comes to be what it is.

The start takes no import lock and no `__main__` of the user's program: a script needs no `if __name__ == "__main__"`
to run an engine process, unless it has registered a plugin that is defined in the script itself.
"""

from __future__ import annotations

import os
import pickle
import runpy
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO

from llmkit.errors import PluginError

if TYPE_CHECKING:
    from llmkit.execution.setup import LoadProgress
    from llmkit.logs import LogFormat

CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from llmkit.engine.process.child import main; main()"
"""Run with `-c`; the argument is the parent's sys.path."""

_LENGTH = struct.Struct("<Q")

_MAIN = "__mp_main__"  # the name under which multiprocessing, too, imports a program's main module again

_importing_main = False


@dataclass(frozen=True)
class Boot:
    """What a new process needs before anything else. All types are plain.

    inbox, outbox: ZMQ endpoints to connect to, from and to the parent. folder: where they are. record_fd: for the
    PlanRecorder. heartbeat_s: seconds between two heartbeats. main_path: file of the parent's main module, if it has
    to be imported; log_level, log_format: of llmkit's log.
    """

    inbox: str
    outbox: str
    folder: str
    parent_pid: int
    record_fd: int
    heartbeat_s: float
    log_level: str = "warning"
    main_path: str | None = None
    log_format: LogFormat = "text"


Builder = Callable[["LoadProgress"], Any]
"""Builds the engine; travels pickled."""


def write_boot(stream: BinaryIO, boot: Boot, payload: bytes) -> None:
    """Send `boot`, and the pickled builder in `payload`. The stream stays open: its end is the end of the parent."""
    for data in (pickle.dumps(boot), payload):
        stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes:
    """One of the two things that `write_boot` writes. Raises EOFError."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (size,) = _LENGTH.unpack(head)
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def main_path() -> str | None:
    """File of the main module of this process; None if it has none that could be imported again."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.abspath(path) if path and path.endswith(".py") else None


def import_main(path: str) -> None:
    """Import the parent's main module, as multiprocessing does: under another name, so that what stands below
    `if __name__ == "__main__"` does not run. Its definitions are found under `__main__` afterwards."""
    global _importing_main
    _importing_main = True
    try:
        content = runpy.run_path(path, run_name=_MAIN)
    finally:
        _importing_main = False
    main = ModuleType(_MAIN)
    main.__dict__.update(content)
    sys.modules["__main__"] = sys.modules[_MAIN] = main


def refuse_engine_in_import() -> None:
    """Raises PluginError where a program's main module, imported by `import_main`, starts an engine itself."""
    if _importing_main:
        raise PluginError(
            "The engine process imports the program again, to find the plugin that is defined in it, and the program "
            "starts an engine when it is imported.",
            hint='Put what it does below `if __name__ == "__main__":`, or define the plugin in a module of its own.',
        )
