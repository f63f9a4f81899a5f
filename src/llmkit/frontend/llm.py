"""LLM: an engine in this process, and the plain way to use it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from llmkit.config import EngineConfig
from llmkit.engine.client import EngineClient, InlineClient
from llmkit.errors import EngineClosedError, EngineError, InvalidRequestError
from llmkit.frontend.arguments import engine_config, input_processor, render_arguments
from llmkit.frontend.embedding import EmbeddingParams
from llmkit.frontend.generation_defaults import default_sampling_params
from llmkit.frontend.input_processor import PreparedRequest
from llmkit.frontend.output_processor import OutputProcessor
from llmkit.frontend.progress import RequestProgress
from llmkit.frontend.prompts import (
    Prompt,
    RequestOptions,
    is_conversation,
    is_one_prompt,
    one_each,
    options_each,
)
from llmkit.frontend.request_loop import RequestLoop
from llmkit.requests import validation
from llmkit.requests.message import Pooling
from llmkit.requests.output import EmbeddingOutput, RequestOutput
from llmkit.requests.sampling_params import OutputKind, SamplingParams

if TYPE_CHECKING:
    from llmkit.engine.factory import Engine, PreparedModel
    from llmkit.engine.stats import EngineStats
    from llmkit.execution.setup import LoadProgress
    from llmkit.frontend.tokenizer import Tokenizer
    from llmkit.registry import PluginTiming, Registry

Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A model, loaded and ready.

        with LLM("smollm2-135m-instruct") as llm:
            print(llm.generate("The capital of France is")[0].outputs[0].text)

    model: folder, GGUF file, or name in the llmkit cache. settings: any setting of the configuration by its flat
    (`max_model_len=1024`) or dotted key (`**{"kv_cache.dtype": "float32"}`); what is not given comes from the
    environment (`LLMKIT_…`) and the defaults. config: a complete EngineConfig instead of all that.
    registry: plugins; default: those installed. progress: called with (bytes read, bytes in all) while weights load.
    process: the engine in a supervised process of its own, which is started again when it dies.

    Raises ConfigError, PluginError, ModelError, OutOfMemoryError. Threads may share an LLM; their requests are
    batched, but steps run in whichever thread is waiting.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        config: EngineConfig | None = None,
        registry: Registry | None = None,
        progress: LoadProgress | None = None,
        process: bool = False,
        **settings: Any,
    ) -> None:
        from llmkit.engine.factory import prepare_model

        prepared = prepare_model(engine_config(model, config, settings), registry)
        processor = input_processor(prepared)
        self._engine, client = _start(prepared, progress, process=process)
        self.config = prepared.config
        self._generation_config = prepared.source.generation_config if self.config.model.generation_config else {}
        self._inputs = processor
        self._loop: RequestLoop | None = RequestLoop(client, OutputProcessor(prepared.tokenizer))

    # Generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        user: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answers to one or several prompts (texts, token ids, mappings), in their order.

        sampling_params, options: one for all prompts, or one each; without parameters, the model's own defaults
        (`get_default_sampling_params`). user, priority: what schedulers that know them go by (`fair`, `priority`), for
        all prompts or one each; fields of options as well. use_tqdm: a progress bar; None: on a terminal, for several
        prompts.

        Raises InvalidRequestError before anything runs if one prompt is bad; `prompts[i]` in the message says which.
        A request that fails later comes back with finish_reason "error".
        """
        many = [prompts] if is_one_prompt(prompts) else list(_sequence(prompts))
        if not many:
            raise InvalidRequestError("prompts must not be empty.", param="prompt")
        each = options_each(options, len(many), user=user, priority=priority)
        return self._run(self._prepare_all(many, sampling_params, each, None), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        user: str | Sequence[str | None] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one or several conversations, each a list of messages with `role` and `content`.

        add_generation_prompt: default: unless continue_final_message, which lets the model go on with the last
        message. user, priority: as in `generate`. Raises InvalidRequestError as `generate` does, also for whatever the
        chat template refuses.
        """
        arguments = render_arguments(add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        conversations = [messages] if is_conversation(messages) else list(_sequence(messages))
        if not conversations:
            raise InvalidRequestError("messages must not be empty.", param="messages")
        prompts = [{"messages": conversation} for conversation in conversations]
        each = options_each(options, len(prompts), user=user, priority=priority)
        return self._run(self._prepare_all(prompts, sampling_params, each, arguments), use_tqdm)

    def stream(
        self,
        prompt: Prompt | Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        options: RequestOptions | None = None,
        user: str | None = None,
        priority: int | None = None,
        **chat_arguments: Any,
    ) -> Iterator[RequestOutput]:
        """The answer to one prompt or conversation as it comes: every output holds only what is new.

        chat_arguments, user, priority: as in `chat`. The request is checked at once and runs while it is iterated;
        closing the iterator aborts it. Several streams may be open at a time. Raises as `generate` does.
        """
        one: Any = {"messages": prompt} if is_conversation(prompt) else prompt
        arguments = render_arguments(**chat_arguments)
        params = self._params(sampling_params, OutputKind.DELTA)
        (merged,) = options_each(options, 1, user=user, priority=priority)
        prepared = self._inputs.prepare(one, params, merged, chat_arguments=arguments)
        return self._running().stream(prepared)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        dimensions: int | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingOutput]:
        """Embeddings of one or several prompts, in their order, from the decoder's hidden states after its last norm.

        pooling: "last": that of the prompt's last token; "mean": the mean over all its tokens, which are then computed
        even where the prefix cache has them. normalize: to length 1. dimensions: keep so many of the first numbers;
        None: all. options, use_tqdm: as in `generate`.

        Raises InvalidRequestError before anything runs, RequestFailedError if one of them fails later.
        """
        params = EmbeddingParams(pooling, normalize, dimensions)
        many = [prompts] if is_one_prompt(prompts) else list(_sequence(prompts))
        if not many:
            raise InvalidRequestError("prompts must not be empty.", param="prompt")
        self._running()
        prepared = []
        for i, (prompt, one) in enumerate(zip(many, options_each(options, len(many)), strict=True)):
            with _numbered("prompts", i, len(many)):
                prepared.append(self._inputs.prepare_embedding(prompt, params, one))
        return [params.output(answer) for answer in self._run(prepared, use_tqdm)]

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What `generate` uses without parameters: temperature, top_p, top_k, min_p, repetition_penalty and
        max_new_tokens of the model's generation_config.json, where it has them; `changes` replace fields."""
        return default_sampling_params(self._generation_config, changes)

    # Tokens

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, None if it has none."""
        return self._inputs.tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidRequestError if the model has no tokenizer, or for anything but text."""
        if not isinstance(text, str):
            raise validation.refuse("text", text, "a text")
        return self._tokenizer().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids without a token become nothing. Raises InvalidRequestError if the model has no
        tokenizer, or for anything but ids from 0."""
        ids = validation.integers("token_ids", token_ids, "a list of token ids", 0, 2**31 - 1)
        return self._tokenizer().decode(ids, skip_special_tokens=skip_special_tokens)

    # Life cycle

    @property
    def engine(self) -> Engine:
        """What runs: plugins chosen, memory plan, layout. Raises EngineClosedError; EngineError if the engine is in
        another process."""
        self._running()
        if self._engine is None:
            raise EngineError("the engine runs in another process and cannot be reached as an object.")
        return self._engine

    def stats(self) -> EngineStats:
        """A snapshot of queues, cache and counters. Raises EngineClosedError."""
        return self._running().client.stats()

    def plugin_timings(self) -> tuple[PluginTiming, ...]:
        """What every plugin that was loaded has cost so far: seconds to import it and to build its object, and count
        and host time of the calls that are made about once a step (scheduler, executor, model, attention, extensions).
        Raises EngineClosedError."""
        return tuple(self._running().client.call("plugin_timings"))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False if running requests prevented it. Raises EngineClosedError."""
        return self._running().client.reset_prefix_cache()

    def close(self) -> None:
        """Stop the engine and free weights and cache. May be called twice; anything else raises EngineClosedError."""
        loop, self._loop, self._engine = self._loop, None, None
        if loop is None:
            return
        loop.close()
        # Layers and their context refer to one another: without a collection the weights would stay for a while.
        gc.collect()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Helpers

    def _running(self) -> RequestLoop:
        if self._loop is None:
            raise EngineClosedError("the engine has been closed.")
        return self._loop

    def _tokenizer(self) -> Tokenizer:
        if self._inputs.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer.", param="prompt")
        return self._inputs.tokenizer

    def _params(self, params: SamplingParams | None, kind: OutputKind) -> SamplingParams:
        if params is None:
            return self.get_default_sampling_params(output_kind=kind)
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {type(params).__name__}.", param="sampling_params"
            )
        return params if params.output_kind is kind else params.with_values(output_kind=kind)

    def _prepare_all(
        self, prompts: Sequence[Any], params: Any, options: Sequence[Any], chat_arguments: Mapping[str, Any] | None
    ) -> list[PreparedRequest]:
        self._running()
        params_each = one_each("sampling_params", params, len(prompts))
        prepared = []
        resolved: dict[int, SamplingParams] = {}
        for i, prompt in enumerate(prompts):
            with _numbered("prompts" if chat_arguments is None else "messages", i, len(prompts)):
                given = params_each[i]
                if id(given) not in resolved:
                    resolved[id(given)] = self._params(given, OutputKind.FINAL_ONLY)
                prepared.append(
                    self._inputs.prepare(prompt, resolved[id(given)], options[i], chat_arguments=chat_arguments)
                )
        return prepared

    def _run(self, prepared: list[PreparedRequest], use_tqdm: bool | None) -> list[RequestOutput]:
        with RequestProgress(len(prepared), use_tqdm) as progress:
            return self._running().run(prepared, progress.finished)


def _start(
    prepared: PreparedModel, progress: LoadProgress | None, *, process: bool
) -> tuple[Engine | None, EngineClient]:
    """The engine, if it is in this process, and its client."""
    if process:
        from llmkit.engine.process_client import start_supervised_client

        return None, start_supervised_client(prepared.config, prepared.registry, progress)
    from llmkit.engine.factory import start_engine

    engine = start_engine(prepared, progress)
    return engine, InlineClient(engine)


@contextmanager
def _numbered(what: str, number: int, count: int) -> Iterator[None]:
    """Say in the message of an InvalidRequestError which of several prompts it is about."""
    try:
        yield
    except InvalidRequestError as error:
        if count == 1:
            raise
        message = f"{what}[{number}]: {error.message}"
        raise InvalidRequestError(message, param=error.param, hint=error.hint) from error


def _sequence(values: Any) -> Sequence[Any]:
    if not isinstance(values, Sequence) or isinstance(values, (bytes, bytearray)):
        raise InvalidRequestError(
            f"prompts must be a prompt or a list of prompts, got {type(values).__name__}.", param="prompt"
        )
    return values
