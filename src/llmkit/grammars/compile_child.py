"""Compiling one grammar in a child process that may die of it."""

from __future__ import annotations

import os
import pickle
import resource
import threading
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from llmkit.errors import InvalidRequestError, described
from llmkit.grammars.backends import MAX_SHOWN
from llmkit.grammars.compile_messages import Compile, Outcome
from llmkit.grammars.constraints import check_request
from llmkit.grammars.trial import too_slow
from llmkit.hookspecs.structured import GrammarCompiler

if TYPE_CHECKING:
    from llmkit.frontend.token_vocabulary import TokenVocabulary

STACK_BYTES = 4 << 20
"""Stack of the thread that compiles here. The thread that loads in the engine has a larger one: what did not overflow
here will not there."""

NICE = 10
_OUT_OF_MEMORY = ("bad_alloc", "out of memory", "cannot allocate memory", "memory allocation", "std::length_error")


def run_child(
    task: Compile,
    compiler: GrammarCompiler,
    vocabulary: TokenVocabulary,
    write_fd: int,
    *,
    timeout_s: float,
    memory_bytes: int,
    mask_s: float,
) -> NoReturn:
    """Compile, try the result, write the pickled Outcome to `write_fd`, and end the process. Called after a fork."""
    status = 1
    try:
        os.nice(NICE)  # the step loop comes first
        _limit(timeout_s, memory_bytes)
        outcome = _in_thread(lambda: _outcome(task, compiler, vocabulary, mask_s))
        data = pickle.dumps(outcome, protocol=pickle.HIGHEST_PROTOCOL)
        with os.fdopen(write_fd, "wb") as stream:
            stream.write(data)
        status = 0
    except MemoryError:
        status = 2
    finally:
        os._exit(status)


def _limit(timeout_s: float, memory_bytes: int) -> None:
    """Limits that hold even if nobody is left to watch: processor time, memory beyond what the process has, no core."""
    seconds = int(timeout_s) + 1 + int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    _lower(resource.RLIMIT_CPU, seconds)
    _lower(resource.RLIMIT_CORE, 0)
    held = _address_space()
    if held is not None:
        _lower(resource.RLIMIT_AS, held + memory_bytes + STACK_BYTES)


def _lower(what: int, limit: int) -> None:
    _, hard = resource.getrlimit(what)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(what, (limit, hard))


def _address_space() -> int | None:
    """Bytes of address space of this process; None where the system does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return None


def _in_thread(make: Callable[[], Outcome]) -> Outcome:
    outcomes: list[Outcome] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: outcomes.append(make()))
    thread.start()
    thread.join()
    return outcomes[0]


def _outcome(task: Compile, compiler: GrammarCompiler, vocabulary: TokenVocabulary, mask_s: float) -> Outcome:
    number, request = task.number, task.request
    start = perf_counter()
    try:
        refusal = _judged(task, compiler, vocabulary)
        if refusal is not None:
            return refusal
        data = compiler.compile(request)
        # What the engine will do with it: a grammar that dies of that shall do so here.
        row = np.zeros(vocabulary.num_words, dtype=np.int32)
        compiled = compiler.load(request, data)
        grammar = compiled.start()
        grammar.fill_bitmask(row)
        grammar.is_accepting()
        slow = too_slow(compiled, vocabulary.tokens, mask_s)
        if slow is not None:
            return Outcome(number, "refused", message=slow)
        return Outcome(number, "compiled", data, seconds=perf_counter() - start)
    except InvalidRequestError as error:
        return Outcome(number, "refused", message=str(error))
    except BaseException as error:
        words = described(error)
        if isinstance(error, MemoryError) or any(sign in words.lower() for sign in _OUT_OF_MEMORY):
            return Outcome(number, "limit", message=words)
        return Outcome(number, "failed", message=words)


def _judged(task: Compile, compiler: GrammarCompiler, vocabulary: TokenVocabulary) -> Outcome | None:
    """What nobody has asked yet of the request; None if nothing speaks against it."""
    if task.check:
        try:
            check_request(task.request, vocabulary)
        except InvalidRequestError as error:
            return Outcome(task.number, "malformed", message=error.message)
    problems = [str(problem) for problem in compiler.problems(task.request)] if task.ask else []
    return Outcome(task.number, "refused", message=" ".join(problems[:MAX_SHOWN])) if problems else None
