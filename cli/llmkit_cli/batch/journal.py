"""Results as they come, in a file beside the output, so that a batch which breaks off goes on where it was."""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from llmkit.errors import ConfigError


class _Entry(msgspec.Struct):
    """line: its number in the input, from 0. digest: of the line. final: whether asking again would be no use."""

    line: int
    digest: str
    final: bool
    result: msgspec.Raw


_decode = msgspec.json.Decoder(_Entry).decode


class Journal:
    """The results so far of one output file. To be entered; `publish` makes the output of it.

    It lies in `OUTPUT.part`, an entry a line. Another process with the same output is refused. Raises ConfigError.
    """

    def __init__(self, output: Path) -> None:
        self._output = output
        self.path = output.with_name(output.name + ".part")
        self._places: dict[int, tuple[str, bool, int]] = {}
        self._file: BinaryIO | None = None

    def __enter__(self) -> Journal:
        try:
            self._file = open(self.path, "a+b")
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(f"Another process writes {self._output} already.") from None
        self._read()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._places:
            self.path.unlink(missing_ok=True)
        self._open_file.close()

    @property
    def _open_file(self) -> BinaryIO:
        assert self._file is not None, "the journal is to be entered first"
        return self._file

    def _read(self) -> None:
        """Find the entries of an earlier run; a last one that was cut off goes."""
        file = self._open_file
        file.seek(0)
        end = 0
        for line in file:
            try:
                entry = _decode(line)
            except (msgspec.MsgspecError, UnicodeError):
                break
            if not line.endswith(b"\n"):
                break
            self._places[entry.line] = (entry.digest, entry.final, end)
            end += len(line)
        file.truncate(end)

    def has(self, number: int, line: bytes) -> bool:
        """Whether this line of the input has its result; one that was changed since has not, nor has one whose result
        may be better the next time."""
        digest, final, _ = self._places.get(number, ("", False, 0))
        return final and digest == digest_of(line)

    def add(self, number: int, line: bytes, result: dict[str, Any], *, final: bool) -> None:
        """Keep a result; it is in the file when this returns. Raises ConfigError."""
        file = self._open_file
        place = file.seek(0, os.SEEK_END)
        entry = {"line": number, "digest": digest_of(line), "final": final, "result": result}
        try:
            file.write(msgspec.json.encode(entry) + b"\n")
            file.flush()
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {error.strerror}.") from error
        self._places[number] = (digest_of(line), final, place)

    def publish(self, numbers: list[int]) -> None:
        """Write the results of these lines, in this order, as the output, whole or not at all; the journal goes at
        the end.

        Raises ConfigError if that fails; the journal then stays."""
        temporary = self._output.with_name(self._output.name + ".new")
        file = self._open_file
        try:
            with open(temporary, "wb") as output:
                for number in numbers:
                    file.seek(self._places[number][2])
                    output.write(bytes(_decode(file.readline()).result) + b"\n")
                output.flush()
                os.fsync(output.fileno())
            os.replace(temporary, self._output)
        except OSError as error:
            raise ConfigError(f"{self._output} cannot be written: {error.strerror}.") from error
        self._places.clear()


def digest_of(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()[:32]
