"""An engine without a model, for tests of what stands around an engine: quick to start, deterministic, and faulty on
request. Imports no torch.

A request chooses its fault with `extra_args`: {"fault": "kill", "at": 5} when its first sequence has 5 tokens, "at": -1
when it is taken in, "after_steps": 5 so many steps later, of none of which it is part. The faults: "kill" and
"segfault" (signals), "exit" (status 3), "hang" (keeps the step from ending), "freeze" (stops the whole process,
heartbeats too), "raise" (the step is broken off), "fail" (ends with an error, alone). {"once": PATH}: only if that file
does not exist; it is made then.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from llmkit.engine.stats import EngineStats
from llmkit.errors import EngineError, InvalidRequestError
from llmkit.requests.message import EngineOutput, EngineRequest, FinishReason

if TYPE_CHECKING:
    from llmkit.execution.setup import LoadProgress

VOCABULARY = 50_000


def next_token(history: Iterable[int], seed: int) -> int:
    """The token after `history` in a sequence with `seed`."""
    state = seed & 0xFFFFFFFF
    for token in history:
        state = (state * 1_000_003 + token + 1) % ((1 << 61) - 1)
    return state % VOCABULARY


def fake_tokens(prompt: Iterable[int], seed: int, num_tokens: int) -> list[int]:
    """What a sequence with `seed` answers to `prompt`, undisturbed."""
    history = list(prompt)
    start = len(history)
    for _ in range(num_tokens):
        history.append(next_token(history, seed))
    return history[start:]


@dataclass
class _Sequence:
    tokens: list[int]
    end: FinishReason | None = None


@dataclass
class _Running:
    request: EngineRequest
    sequences: list[_Sequence]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def finished(self) -> bool:
        return all(sequence.end is not None for sequence in self.sequences)


@dataclass
class FakeCore:
    """Every step gives every sequence one token. step_s: how long a step takes. fatal_file: a file whose existence
    makes every step the last. Sequence i has the seed plus i."""

    step_s: float = 0.0
    max_num_seqs: int = 1024
    fatal_file: str | None = None
    on_plan: Callable[[Any], None] | None = None
    num_steps: int = 0
    _requests: dict[str, _Running] = field(default_factory=dict)
    _apart: dict[str, tuple[int, _Running]] = field(default_factory=dict)

    def add(self, request: EngineRequest) -> None:
        if request.request_id in self._requests:
            raise InvalidRequestError("The id is in use.", param="request_id")
        arguments = request.sampling_params.extra_args or {}
        if arguments.get("fault") == "refuse":
            raise InvalidRequestError("This request is refused.", param="prompt")
        if arguments.get("at") == -1:
            _commit(arguments["fault"], _Running(request, []))
        prior = request.prior_outputs
        count = request.sampling_params.n
        sequences = [_Sequence(list(p.token_ids), p.finish_reason) for p in prior] or [
            _Sequence([]) for _ in range(count)
        ]
        running = _Running(request, sequences)
        if "after_steps" in arguments:
            self._apart[request.request_id] = self.num_steps + arguments["after_steps"], running
        else:
            self._requests[request.request_id] = running

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._apart.pop(request_id, None)

    def abort_sequence(self, request_id: str, index: int) -> None:
        running = self._requests.get(request_id)
        if running is not None:
            running.sequences[index].end = "abort"
            if running.finished:
                del self._requests[request_id]

    def has_work(self) -> bool:
        return bool(self._requests or self._apart)

    def has_transfers(self) -> bool:
        return False

    def step_transfers(self) -> bool:
        return False

    def step(self) -> list[EngineOutput]:
        for at, running in self._apart.values():
            if self.num_steps >= at:
                _commit((running.request.sampling_params.extra_args or {})["fault"], running)
        batch = list(self._requests.values())[: self.max_num_seqs]
        if self.on_plan is not None:
            self.on_plan(SimpleNamespace(num_tokens=len(batch), requests=batch))
        if self.fatal_file is not None and os.path.exists(self.fatal_file):
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(self.step_s)
        self.num_steps += 1
        outputs: list[EngineOutput] = []
        for running in batch:
            fault = self._fault(running)
            for index, sequence in enumerate(running.sequences):
                if sequence.end is None:
                    outputs.append(self._advance(running.request, index, sequence, fault))
            if running.finished:
                del self._requests[running.request_id]
        return outputs

    def _advance(self, request: EngineRequest, index: int, sequence: _Sequence, fault: str | None) -> EngineOutput:
        output = EngineOutput(request_id=request.request_id, index=index, new_token_ids=[])
        if fault is not None:
            sequence.end = output.finish_reason = "error"
            output.error = fault
            return output
        params = request.sampling_params
        token = next_token([*request.prompt_token_ids, *sequence.tokens], (params.seed or 0) + index)
        sequence.tokens.append(token)
        output.new_token_ids = [token]
        if len(sequence.tokens) >= request.max_tokens:
            sequence.end = output.finish_reason = "length"
        return output

    def _fault(self, running: _Running) -> str | None:
        arguments = running.request.sampling_params.extra_args or {}
        fault = arguments.get("fault")
        if fault is None or len(running.sequences[0].tokens) != arguments.get("at", 0):
            return None
        once = arguments.get("once")
        if once is not None:
            if os.path.exists(once):
                return None
            open(once, "w").close()
        return _commit(fault, running)

    def stats(self) -> EngineStats:
        count = len(self._requests)
        return EngineStats(
            num_running=min(count, self.max_num_seqs),
            num_waiting=max(0, count - self.max_num_seqs),
            num_unfinished=count,
            num_steps=self.num_steps,
            num_failed_steps=0,
            num_preemptions=0,
            kv_usage=0.0,
            num_blocks=0,
            num_free_blocks=0,
            prefix_query_tokens=0,
            prefix_hit_tokens=0,
        )


def _commit(fault: str, running: _Running) -> str | None:
    signals = {"kill": signal.SIGKILL, "segfault": signal.SIGSEGV, "freeze": signal.SIGSTOP}
    if fault in signals:
        os.kill(os.getpid(), signals[fault])
    elif fault == "exit":
        os._exit(3)
    elif fault == "hang":
        time.sleep(3600)
    elif fault == "raise":
        running.sequences = [_Sequence(sequence.tokens, "error") for sequence in running.sequences]
        raise RuntimeError("this step is broken")
    return "This request fails." if fault == "fail" else None


class FakeServedEngine:
    """As `llmkit.engine.process.served_engine.ServedEngine`. Its
    utilities: stats, pid, echo, sleep, wake_up, sleeping, sleep_s, exit."""

    def __init__(self, core: FakeCore, closed: str | None = None, load_s: float = 0.0) -> None:
        self.core = core
        self._closed = closed
        self._load_s = load_s
        self._slept: list[tuple[Any, ...]] = []

    def info(self) -> SimpleNamespace:
        return SimpleNamespace(pid=os.getpid(), limits=SimpleNamespace(check=_accept))

    def run_utility(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if method == "stats":
            return self.core.stats()
        if method == "pid":
            return os.getpid()
        if method in ("sleep", "wake_up"):
            time.sleep(self._load_s if method == "wake_up" else 0.0)
            self._slept.append((method, *arguments))
            return None
        if method == "sleeping":
            return self._slept
        if method == "echo":
            return arguments
        if method == "sleep_s":
            return time.sleep(arguments[0])
        if method == "exit":
            os._exit(4)
        raise EngineError(f"the engine has no utility {method!r}.")

    def close(self) -> None:
        if self._closed is not None:
            open(self._closed, "w").close()


def _accept(request: EngineRequest) -> None:
    """Every request."""


@dataclass(frozen=True)
class FakeBuilder:
    """Builds a FakeServedEngine in the engine process. error: raised instead. broken: a file whose existence makes it
    die (with a word to the standard error) instead. closed: a file that is made when the engine is closed. load_s: how
    long loading takes, at a wake-up, too; frozen: it stops for ever. fatal_steps: a file whose existence makes every
    step the last."""

    step_s: float = 0.0
    max_num_seqs: int = 1024
    error: Exception | None = None
    broken: str | None = None
    closed: str | None = None
    load_s: float = 0.0
    frozen: bool = False
    fatal_steps: str | None = None

    def __call__(self, progress: LoadProgress) -> FakeServedEngine:
        progress(0, 100)
        time.sleep(self.load_s)
        if self.frozen:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.error is not None:
            raise self.error
        if self.broken is not None and os.path.exists(self.broken):
            os.write(2, b"the device is on fire\n")
            os.kill(os.getpid(), signal.SIGSEGV)
        progress(100, 100)
        return FakeServedEngine(FakeCore(self.step_s, self.max_num_seqs, self.fatal_steps), self.closed, self.load_s)
