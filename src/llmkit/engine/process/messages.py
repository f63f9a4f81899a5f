"""What the engine process and its parent say to one another: msgspec, one message a ZMQ frame.

Requests and outputs are typed through and through. Objects that only Python knows (an error, statistics, the arguments
of a utility call) travel pickled in a field of bytes: both ends are the same user's, over a socket that nobody else
can reach.
"""

from __future__ import annotations

import pickle
from typing import Any

import msgspec

from llmkit.errors import EngineError, LlmkitError, described
from llmkit.requests.message import EngineOutput, EngineRequest

# Parent to child.


class Add(msgspec.Struct, tag="add", gc=False):
    """Requests to take in, all of them before the next step."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag="abort", gc=False):
    """Requests to end. Goes before every request of the same batch that has not been taken in."""

    request_ids: list[str]


class AbortSequences(msgspec.Struct, tag="abort_sequences", gc=False):
    """Single sequences to end: (request id, index)."""

    sequences: list[tuple[str, int]]


class Call(msgspec.Struct, tag="call", gc=False):
    """A utility to run between two steps. arguments: a pickled tuple. Answered by the Result of the same number."""

    number: int
    method: str
    arguments: bytes


class Stop(msgspec.Struct, tag="stop", gc=False):
    """End in good order."""


ToChild = Add | Abort | AbortSequences | Call | Stop

# Child to parent.


class Hello(msgspec.Struct, tag="hello", gc=False):
    """The sockets are connected; what follows is the loading of the model."""

    pid: int


class Progress(msgspec.Struct, tag="progress", gc=False):
    """Bytes of weights read, and in all (None: unknown)."""

    done: int
    total: int | None


class Ready(msgspec.Struct, tag="ready", gc=False):
    """Requests are served from now on. about: the pickled EngineInfo."""

    about: bytes


class Failed(msgspec.Struct, tag="failed", gc=False):
    """The engine could not be built, or its loop has ended by an error; the process is about to end."""

    error: bytes


class EngineSummary(msgspec.Struct, gc=False):
    """The engine after its last step. num_steps, num_preemptions, prefix_query_tokens, prefix_hit_tokens: totals since
    the start of the process. num_tokens: computed since the message before. step_s: seconds that the step took."""

    num_steps: int
    num_tokens: int
    num_running: int
    num_waiting: int
    kv_usage: float
    num_preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    step_s: float


class Outputs(msgspec.Struct, tag="outputs", gc=False):
    """What a step has brought. seen: messages from the parent that had been taken in by then."""

    seen: int
    outputs: list[EngineOutput]
    summary: EngineSummary | None = None


class Result(msgspec.Struct, tag="result", gc=False):
    """The answer to a Call: what the utility returned or, if `failed`, raised; pickled."""

    number: int
    value: bytes
    failed: bool


class Heartbeat(msgspec.Struct, tag="heartbeat", gc=False):
    """From a thread of its own. age_s: seconds that the loop has been at what it is doing (`activity`) now; 0 while it
    waits for requests. bounded: however large the model is, that takes no longer than a step may."""

    activity: str
    age_s: float
    bounded: bool = True


FromChild = Hello | Progress | Ready | Failed | Outputs | Result | Heartbeat

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_child = msgspec.msgpack.Decoder(ToChild).decode
decode_from_child = msgspec.msgpack.Decoder(FromChild).decode


def dumped_error(error: BaseException) -> bytes:
    """`error`, pickled; one that does not survive that as an EngineError with its words."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        data = pickle.dumps(EngineError(described(error)))
    return data


def loaded_error(data: bytes) -> Exception:
    """The error that `dumped_error` wrote; an EngineError if it is of a type that this process does not have."""
    try:
        error = pickle.loads(data)
    except Exception as problem:
        return EngineError(f"The engine process reported an error that cannot be read here: {described(problem)}")
    return error if isinstance(error, Exception) else EngineError(described(error))


def start_failure(error: BaseException) -> LlmkitError:
    """How an error that kept the engine from starting is told: the deliberate ones as they are."""
    if isinstance(error, LlmkitError):
        return error
    return EngineError(f"The engine could not be started: {described(error)}.", hint="Its log says where.")


def dumped(value: Any) -> bytes:
    """`value`, pickled. Raises what pickle raises."""
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def loaded(data: bytes) -> Any:
    """What `dumped` wrote."""
    return pickle.loads(data)
