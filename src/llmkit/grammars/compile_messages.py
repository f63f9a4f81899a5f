"""What the engine and its compile process say to each other, and how."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from llmkit.hookspecs.structured import GrammarRequest

if TYPE_CHECKING:
    from llmkit.frontend.token_vocabulary import TokenVocabulary
    from llmkit.registry import Registry

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Hello:
    """First message to the process. timeout_s, memory_bytes: limits of one grammar. mask_s: processor time that one
    token may take. max_children: grammars that are compiled at a time."""

    registry: Registry
    vocabulary: TokenVocabulary
    timeout_s: float
    memory_bytes: int
    max_children: int
    mask_s: float


@dataclass(frozen=True)
class Compile:
    """To the process. number: tells the answer; never used twice. again: an engine before this one has failed, so that
    grammars that none has been asked for yet go first. check: nobody has looked at the request yet. ask: the engine has
    not been asked for its problems with it."""

    number: int
    backend: str
    request: GrammarRequest
    again: bool = False
    check: bool = False
    ask: bool = False


@dataclass(frozen=True)
class Cancel:
    """To the process: nobody wants that grammar any more. No answer follows."""

    number: int


OutcomeKind = Literal["compiled", "malformed", "refused", "limit", "crashed", "failed"]


@dataclass(frozen=True)
class Outcome:
    """From the process, once for each Compile that is not cancelled.

    compiled: `data` is for `load`. malformed: the request is wrong whichever engine gets it. refused: the engine's own
    refusal. limit: of time or memory. crashed: the library took the child down. failed: the plugin raised something
    else. message: what to tell the user.
    """

    number: int
    kind: OutcomeKind
    data: bytes = b""
    message: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Begun:
    """From the process: a grammar waits no longer, it is being compiled."""

    number: int


@dataclass(frozen=True)
class Alive:
    """From the process: it does something, though no grammar is finished."""


def write(stream: BinaryIO, message: Any) -> None:
    """One message, whole. Raises OSError if the other side is gone."""
    stream.write(packed(message))
    stream.flush()


def packed(message: Any) -> bytes:
    """One message as bytes. Raises whatever pickling it raises."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def read(stream: BinaryIO) -> Any:
    """The next message. Raises EOFError if the other side is gone, or whatever unpickling it raises."""
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    return pickle.loads(_exactly(stream, length))


def _exactly(stream: BinaryIO, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = stream.read(count - len(data))  # fewer bytes, if the stream has no buffer
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
