"""AsyncLLM: an engine beside an event loop, for servers and whoever else serves many at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llmkit.config import EngineConfig
from llmkit.engine.async_client import EngineHealth, start_async_client
from llmkit.errors import RequestFailedError
from llmkit.frontend.arguments import engine_config, input_processor, render_arguments
from llmkit.frontend.async_request_loop import AsyncRequestLoop
from llmkit.frontend.async_submission import Submission
from llmkit.frontend.embedding import EmbeddingParams
from llmkit.frontend.generation_defaults import default_sampling_params
from llmkit.frontend.input_processor import InputProcessor, ModelLimits
from llmkit.frontend.output_processor import OutputProcessor
from llmkit.frontend.prompts import Prompt, RequestOptions
from llmkit.metrics.requests import RequestTotals
from llmkit.requests.message import Pooling
from llmkit.requests.output import EmbeddingOutput, RequestOutput
from llmkit.requests.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmkit.engine.stats import EngineStats, StepSummary
    from llmkit.execution.setup import LoadProgress
    from llmkit.frontend.tokenizer import Tokenizer
    from llmkit.kv_cache.stats import KVMap
    from llmkit.metrics.engine import EngineSnapshot
    from llmkit.metrics.record import RequestRecord
    from llmkit.registry import PluginTiming, Registry, Selection
    from llmkit.requests.grammar_task import GrammarTask


class AsyncLLM:
    """A model, loaded and ready, for one event loop.

        async with AsyncLLM("smollm2-135m-instruct") as llm:
            async for output in llm.generate("The capital of France is", SamplingParams(output_kind="delta")):
                print(output.outputs[0].text, end="")

    model, settings, config, registry, progress: as of `LLM`. process: the engine in a process of its own; else it is a
    thread of this one. The constructor blocks until the model is loaded; everything else that waits is a coroutine.

    Raises ConfigError, PluginError, ModelError, OutOfMemoryError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        registry: Registry | None = None,
        progress: LoadProgress | None = None,
        process: bool = True,
        **settings: Any,
    ) -> None:
        from llmkit.engine.factory import prepare_model

        prepared = prepare_model(engine_config(model, config, settings), registry, online=True)
        if prepared.grammars is not None and prepared.config.structured.preload_grammars:
            prepared.grammars.preload()
        self._inputs = input_processor(prepared)
        self.config = prepared.config
        self._generation_config = prepared.source.generation_config if self.config.model.generation_config else {}
        client = start_async_client(prepared, progress, process=process)
        self.totals = RequestTotals(self.limits.max_model_len)
        self._loop = AsyncRequestLoop(client, OutputProcessor(prepared.tokenizer, self.totals))
        self._chooser = ThreadPoolExecutor(1, "llmkit-grammar-chooser")
        self._loop.on_ended.append(self.totals.ended)

    # Generating

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        timeout: float | None = None,
        chat_arguments: Mapping[str, Any] | None = None,
        grammar: GrammarTask | None = None,
    ) -> Submission:
        """Check a request and hand it over at once; iterate over what is returned for its outputs.

        prompt: text, token ids, or a mapping, which may hold a conversation (`messages`). sampling_params: default: the
        model's own, see `get_default_sampling_params`; output_kind says what an output holds. timeout: seconds until
        the request is aborted; its reader then gets a RequestTimeoutError behind what there was. chat_arguments: for a
        conversation, arguments of `chat`, and `documents`. grammar: what `choose_grammar` has returned for the
        parameters; default: it is chosen now.

        Raises InvalidRequestError; EngineDrainingError, EngineDeadError, EngineClosedError if no request can be taken.
        To be called where the event loop runs.
        """
        self._loop.check_open()
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        arguments = render_arguments(**(chat_arguments or {}))
        prepared = self._inputs.prepare(prompt, params, options, chat_arguments=arguments, grammar=grammar)
        return self._loop.submit(prepared, timeout)

    async def choose_grammar(self, sampling_params: SamplingParams) -> GrammarTask | None:
        """`grammar` of `submit`, chosen in a thread, one request's after the other's: a large schema or expression
        takes seconds to be read, in which the event loop goes on. None if nothing constrains the text.

        Raises InvalidRequestError."""
        if not isinstance(sampling_params, SamplingParams) or sampling_params.constraint is None:
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._chooser, self._inputs.grammar_task, sampling_params)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        timeout: float | None = None,
        chat_arguments: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request, which begins when the first one is asked for; arguments, and what is raised then,
        as of `submit`. A generator that is closed, cancelled or forgotten aborts its request. A request that fails ends
        with an output whose finish reason is "error"."""
        grammar = None if sampling_params is None else await self.choose_grammar(sampling_params)
        submission = self.submit(
            prompt, sampling_params, options=options, timeout=timeout, chat_arguments=chat_arguments, grammar=grammar
        )
        try:
            async for output in submission:
                yield output
        finally:
            submission.abort()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        timeout: float | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """`generate` for a conversation: messages with `role` and `content`. The other arguments are those of
        `LLM.chat`."""
        arguments = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        prompt = {"messages": messages}
        return self.generate(prompt, sampling_params, options=options, timeout=timeout, chat_arguments=arguments)

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        options: RequestOptions | None = None,
        timeout: float | None = None,
    ) -> EmbeddingOutput:
        """The embedding of one prompt, see `LLM.embed`; batched with whatever else runs. A task that is cancelled while
        it waits aborts it. Raises as `submit` does, and RequestFailedError or RequestTimeoutError."""
        self._loop.check_open()
        params = EmbeddingParams(pooling, normalize, dimensions)
        submission = self._loop.submit(self._inputs.prepare_embedding(prompt, params, options), timeout)
        await submission.first()
        async for output in submission:
            return params.output(output)
        raise RequestFailedError("the request ended without an answer.")

    def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests by the ids of their outputs; their readers get what there is, with finish reason "abort"."""
        self._loop.abort_named([request_id] if isinstance(request_id, str) else request_id)

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What is used without parameters, see `LLM.get_default_sampling_params`; `changes` replace fields."""
        return default_sampling_params(self._generation_config, changes)

    # What it is

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None if it has none."""
        return self._inputs.tokenizer

    @property
    def input_processor(self) -> InputProcessor:
        """What checks and tokenises requests."""
        return self._inputs

    @property
    def limits(self) -> ModelLimits:
        """What the model can take, in tokens."""
        return self._inputs.limits

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return self._loop.num_unfinished

    @property
    def on_request_ended(self) -> list[Callable[[RequestRecord], None]]:
        """Called, where the event loop runs, with the record of every request that ends; to be added to. They must be
        quick; what they raise is logged."""
        return self._loop.on_ended

    @property
    def health(self) -> EngineHealth:
        """How the engine is; does not wait."""
        return self._loop.client.health

    # The engine. All of these raise EngineClosedError and EngineDeadError.

    async def stats(self) -> EngineStats:
        """A snapshot of queues, cache and counters."""
        stats: EngineStats = await self._loop.call("stats")
        return stats

    async def snapshot(self) -> EngineSnapshot:
        """`stats`, and what else the engine's metrics are made of."""
        snapshot: EngineSnapshot = await self._loop.call("snapshot")
        return snapshot

    async def selections(self) -> tuple[Selection, ...]:
        """The plugins that the engine was built from, and why they were chosen."""
        return tuple(await self._loop.call("selections"))

    async def plugin_timings(self) -> tuple[PluginTiming, ...]:
        """See `LLM.plugin_timings`."""
        return tuple(await self._loop.call("plugin_timings"))

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if running requests prevented it."""
        return bool(await self._loop.call("reset_prefix_cache"))

    async def kv_map(self) -> KVMap:
        """What became of every block of the KV cache: free, cached, in use, shared."""
        blocks: KVMap = await self._loop.call("kv_map")
        return blocks

    async def recent_steps(self, after: int = -1) -> list[StepSummary]:
        """Summaries of the last steps, at most some hundreds, oldest first: those with a number above `after`."""
        return list(await self._loop.call("recent_steps", after))

    async def sleep(self, level: int = 1) -> None:
        """Take no steps and give memory back; requests wait, those that run and those that come.

        level: 0: only pause. 1: free the KV cache; on a GPU the weights, too. 2: free the weights everywhere; they are
        read again at `wake_up`. What was computed of running requests is computed again, with the same answers. Raises
        InvalidRequestError, EngineError.
        """
        await self._loop.call("sleep", level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Go on. tags: wake only "weights" or "kv_cache"; requests go on once both are awake. Raises as the start of an
        engine does; it then still sleeps."""
        await self._loop.call("wake_up", None if tags is None else list(tags))

    async def is_sleeping(self) -> bool:
        """Whether any part of the engine sleeps."""
        return bool(await self._loop.call("is_sleeping"))

    async def start_profile(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Record what torch does, for a file in `folder` (default: llmkit-profiles where this process runs). Raises
        EngineError if that goes on already."""
        path = Path("llmkit-profiles" if folder is None else folder).absolute()
        await self._loop.call("start_profile", str(path))

    async def stop_profile(self) -> Path:
        """Write the recording, a trace in Chrome's format; its path. Raises EngineError if there is none."""
        return Path(await self._loop.call("stop_profile"))

    # Its end

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new requests (EngineDrainingError) and wait for those that run, at most `timeout` seconds; whether
        all have ended. Those that have not go on."""
        return await self._loop.drain(timeout)

    async def close(self) -> None:
        """Stop the engine and free what it holds. Readers of unfinished requests get an EngineClosedError. May be
        called twice."""
        self._chooser.shutdown(wait=False, cancel_futures=True)
        await self._loop.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
