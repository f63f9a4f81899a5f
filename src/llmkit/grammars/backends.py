"""The grammar engines of one model: built when first needed, and chosen for each request."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from llmkit.errors import InvalidRequestError, LlmkitError, PluginError, described
from llmkit.grammars.constraints import is_judged_at_the_door
from llmkit.grammars.effort import DOOR_S, Effort, TooMuchEffort
from llmkit.grammars.schema_document import PARAM
from llmkit.grammars.short_turns import short_turns
from llmkit.hookspecs.structured import GrammarCompiler, GrammarRequest
from llmkit.registry.breakers import Breakers
from llmkit.requests.grammar_task import GrammarTask

if TYPE_CHECKING:
    from llmkit.frontend.token_vocabulary import TokenVocabulary
    from llmkit.hookspecs.plugin import Environment
    from llmkit.registry import Registry
    from llmkit.registry.breaker import Breaker
    from llmkit.registry.loading import LoadedPlugin
    from llmkit.registry.timings import CallTiming

logger = logging.getLogger("llmkit.grammars")

KIND = "structured"
MAX_SHOWN = 3
PRELOADED = GrammarRequest("json_object", "")
"""What is chosen, and compiled, before anybody asks: most requests are for JSON."""


@dataclass
class Backend:
    """One grammar engine. choice: what names it in the configuration, here and in the compile process."""

    choice: str
    plugin: LoadedPlugin
    breaker: Breaker
    calls: dict[str, CallTiming]
    compiler: GrammarCompiler | None = None
    rejected: str | None = None


class GrammarBackends:
    """Chooses a grammar engine for a request, and says why, and why not the others.

    choice: a plugin, or "auto": the one with the highest score, then rank, that has no problems with the request.
    vocabulary: makes the model's, when the first compiler is built. Thread-safe enough for one frontend and one engine:
    what two threads may do twice has the same outcome.
    """

    def __init__(
        self,
        choice: str,
        registry: Registry,
        environment: Environment,
        vocabulary: Callable[[], TokenVocabulary],
        breakers: Breakers | None = None,
    ) -> None:
        self.choice = choice
        self.registry = registry
        self._environment = environment
        self._make_vocabulary = vocabulary
        self._breakers = breakers or Breakers()
        self._noted: set[str] = set()
        self._rejected: dict[str, str] = {}

    @cached_property
    def vocabulary(self) -> TokenVocabulary:
        with short_turns():
            return self._make_vocabulary()

    def require(self) -> None:
        """Build the engine that the configuration names; nothing for "auto". Raises PluginError, ConfigError."""
        if self.choice == "auto":
            return
        problems = self._named.plugin.problems(self._environment)
        if problems:
            hint = self._named.plugin.install_hint() or "Choose another one, or auto."
            raise self._named.plugin.row.error("; ".join(problems), hint)
        self._build(self._named)
        self._note(self._named, "named in the configuration", {})

    def preload(self) -> Backend | None:
        """Load plugins, make the vocabulary and import a library now, not with the first request. The engine that most
        requests will have: the configured one, or the best for PRELOADED; None if there is none. Raises nothing: what
        is wrong is logged, and found again by the first request."""
        try:
            choice = self.choice if self.choice != "auto" else self.choose(PRELOADED).backends[0]
            backend = self.backend(choice)
            backend.compiler = backend.compiler or self._build(backend)
        except LlmkitError as error:
            logger.debug("no grammar engine is preloaded: %s", error)
            return None
        except Exception as error:
            logger.warning("no grammar engine could be preloaded", exc_info=error)
            return None
        try:
            backend.compiler.warm_up()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            logger.warning("the grammar engine %s could not be preloaded", backend.choice, exc_info=error)
            return None
        return backend

    def choose(self, request: GrammarRequest) -> GrammarTask:
        """The engines to try for `request`, best first. Raises InvalidRequestError if none can express it, naming what
        stands in the way and, where another engine than the configured one could, that one. What is too large to be
        judged at the door, or takes too long there, goes to all that work."""
        with short_turns():  # a schema is read, and the first time, engines are loaded
            if is_judged_at_the_door(request):
                with contextlib.suppress(TooMuchEffort):
                    return self._choose(request, Effort(DOOR_S))
            return self._unasked(request)

    def _unasked(self, request: GrammarRequest) -> GrammarTask:
        found = [self._named] if self.choice != "auto" else self._candidates
        reasons = {backend.choice: self.why_unusable(backend) for backend in found}
        usable = [backend for backend in found if reasons[backend.choice] is None]
        if not usable:
            raise self._nobody(request, {choice: why for choice, why in reasons.items() if why is not None})
        ordered = sorted(usable, key=lambda backend: -self._score(backend, request))
        self._note(ordered[0], f"the best for a large {request.kind} constraint", {})
        return GrammarTask(request, tuple(backend.choice for backend in ordered), judged=False)

    def _choose(self, request: GrammarRequest, effort: Effort) -> GrammarTask:
        if self.choice != "auto":
            return self._choose_named(request, effort)
        reasons: dict[str, str] = {}
        ordered = sorted(self._candidates, key=lambda backend: -self._score(backend, request))
        for i, backend in enumerate(ordered):
            why_not = self.why_not(backend, request, effort)
            if why_not is None:
                self._note(backend, f"the best that can express a {request.kind} constraint", reasons)
                return GrammarTask(request, tuple(other.choice for other in ordered[i:]))
            reasons[backend.choice] = why_not
        raise self._nobody(request, reasons)

    def backend(self, choice: str) -> Backend:
        """One of the engines of a GrammarTask. Raises KeyError for any other."""
        if self.choice != "auto":
            return self._named
        return next(backend for backend in self._candidates if backend.choice == choice)

    def compiler(self, choice: str) -> GrammarCompiler:
        """The compiler of `backend(choice)`. Raises PluginError if it cannot be built."""
        backend = self.backend(choice)
        return backend.compiler or self._build(backend)

    def why_not(self, backend: Backend, request: GrammarRequest, effort: Effort | None = None) -> str | None:
        """Why `backend` cannot serve `request`; None if it can. Raises InvalidRequestError for a malformed one, and
        TooMuchEffort where finding out exceeds `effort`."""
        why_unusable = self.why_unusable(backend)
        if why_unusable is not None:
            return why_unusable
        try:
            compiler = backend.compiler or self._build(backend)
            with effort.limited() if effort is not None else contextlib.nullcontext():
                problems = [str(problem) for problem in compiler.problems(request)]
        except (InvalidRequestError, TooMuchEffort, KeyboardInterrupt):
            raise
        except PluginError as error:
            backend.rejected = error.message
            return error.message
        except BaseException as error:  # a panic in Rust is no Exception
            backend.breaker.record(error)
            return f"it failed when asked whether it can: {described(error)}"
        return " ".join(problems[:MAX_SHOWN]) if problems else None

    def why_unusable(self, backend: Backend) -> str | None:
        """Why nothing is asked of `backend` now, whatever the request; None if it may be."""
        if backend.breaker.open:
            return f"it has failed too often and is left alone for a while (last: {backend.breaker.last_fault})"
        return backend.rejected

    # ---- who there is

    @cached_property
    def _named(self) -> Backend:
        return self._backend_of(self.choice, self.registry.load(KIND, self.choice))

    @cached_property
    def _candidates(self) -> list[Backend]:
        plugins, self._rejected = self.registry.candidates(KIND, self._environment)
        return [self._backend_of(plugin.row.name, plugin) for plugin in plugins]

    def _backend_of(self, choice: str, plugin: LoadedPlugin) -> Backend:
        timing = self.registry.timings.of(plugin.row)
        return Backend(choice, plugin, self._breakers.of(KIND, plugin.row.name), timing.calls)

    def _build(self, backend: Backend) -> GrammarCompiler:
        built = self.registry.build(backend.plugin, {"vocabulary": self.vocabulary})
        assert isinstance(built, GrammarCompiler)
        backend.compiler = built
        return built

    def _score(self, backend: Backend, request: GrammarRequest) -> int:
        if backend.breaker.open or backend.rejected is not None:
            return 0
        try:
            return int((backend.compiler or self._build(backend)).score(request))
        except LlmkitError as error:
            backend.rejected = error.message
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            backend.breaker.record(error)
        return 0

    def _note(self, backend: Backend, reason: str, rejected: dict[str, str]) -> None:
        if backend.choice not in self._noted:
            self._noted.add(backend.choice)
            self.registry.note_choice(backend.plugin, self.choice, reason, {**self._rejected, **rejected})

    # ---- refusals

    def _choose_named(self, request: GrammarRequest, effort: Effort) -> GrammarTask:
        backend = self._named
        why_not = self.why_not(backend, request, effort)
        if why_not is None:
            return GrammarTask(request, (backend.choice,))
        able = [
            other.choice
            for other in self._candidates
            if other.plugin.row.identity != backend.plugin.row.identity and self.why_not(other, request, effort) is None
        ]
        raise InvalidRequestError(
            f"structured_outputs: {backend.choice} cannot express this {request.kind} constraint: {why_not}",
            param=PARAM,
            hint=f"{able[0]} can (--structured {able[0]}, or auto)." if able else None,
        )

    def _nobody(self, request: GrammarRequest, reasons: dict[str, str]) -> InvalidRequestError:
        if not reasons:
            others = " ".join(f"{name}: {why.rstrip('.')}." for name, why in self._rejected.items())
            return InvalidRequestError(
                f"structured_outputs needs a grammar engine, and none can be used here. {others}".rstrip(),
                param=PARAM,
                hint=self._install_hint(),
            )
        words = " ".join(f"{name}: {why.rstrip('.')}." for name, why in reasons.items())
        return InvalidRequestError(
            f"structured_outputs: no grammar engine can express this {request.kind} constraint. {words}", param=PARAM
        )

    def _install_hint(self) -> str | None:
        """How to get the best engine whose library is missing; None if that is not what is wrong."""
        found: list[tuple[int, str]] = []
        for row in self.registry.find(KIND):
            if not self.registry.in_auto(row):
                continue
            try:
                plugin = self.registry.load_row(row)
            except PluginError:
                continue
            if hint := plugin.install_hint():
                found.append((-plugin.info.rank, hint))
        return min(found)[1] if found else None
