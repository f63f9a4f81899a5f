"""Servers to test: one over a scripted engine, for the protocol; and one over the real model, on a loopback port."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from llmkit import AsyncLLM, EngineConfig, SamplingParams
from llmkit.engine.async_client import EngineHealth
from llmkit.errors import EngineError
from llmkit.frontend.arguments import render_arguments
from llmkit.frontend.async_request_loop import AsyncRequestLoop
from llmkit.frontend.async_submission import Submission
from llmkit.frontend.chat_template import ChatTemplate
from llmkit.frontend.embedding import EmbeddingParams
from llmkit.frontend.input_processor import InputProcessor, ModelLimits
from llmkit.frontend.output_processor import OutputProcessor
from llmkit.frontend.token_vocabulary import TokenVocabulary
from llmkit.grammars.backends import GrammarBackends
from llmkit.hookspecs import Environment
from llmkit.metrics.requests import RequestTotals
from llmkit.registry import Registry
from llmkit.requests.logprobs import PositionLogprobs
from llmkit.requests.message import EngineOutput, EngineRequest
from llmkit.requests.output import EmbeddingOutput
from llmkit.testing.byte_tokenizer import ByteTokenizer
from llmkit_server.app import create_app
from llmkit_server.run import Server, uvicorn_config

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}[tools]{% endif %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


class ScriptedEngine:
    """An engine whose answers are given: the tokens of `answers[index % len(answers)]`, one a step.

    hold: it takes requests and says nothing. fail_after: the answer breaks with an error after that many tokens.
    refuse: message and field of a refusal by the engine. overloaded: it says that it had no room.
    """

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.tokenizer = tokenizer
        self.answers = ["Hello"]
        self.hold = False
        self.fail_after: int | None = None
        self.refuse: tuple[str, str | None] | None = None
        self.overloaded = False
        self.added: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.health = EngineHealth(alive=True, ready=True)
        self._running: dict[tuple[str, int], tuple[EngineRequest, list[int]]] = {}
        self._changed = asyncio.Event()

    def add(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            self.added.append(request)
            for index in range(request.sampling_params.n):
                ids = self.tokenizer.encode(self.answers[index % len(self.answers)])
                self._running[request.request_id, index] = (request, [*ids, self.tokenizer.eos_token_id])
        self._changed.set()

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = set(request_ids)
        self.aborted += ids
        self._running = {key: value for key, value in self._running.items() if key[0] not in ids}

    def abort_sequences(self, sequences: Iterable[tuple[str, int]]) -> None:
        for key in sequences:
            self._running.pop(key, None)

    async def outputs(self) -> list[EngineOutput]:
        while self.hold or not self._running:
            self._changed.clear()
            await self._changed.wait()
        await asyncio.sleep(0)
        return [self._step(*key) for key in list(self._running)]

    def _step(self, request_id: str, index: int) -> EngineOutput:
        request, ids = self._running[request_id, index]
        params = request.sampling_params
        output = EngineOutput(request_id=request_id, index=index, new_token_ids=[])
        if request.pooling is not None and self.refuse is None:
            del self._running[request_id, index]
            output.finish_reason, output.embedding = "length", [3.0, 4.0, float(len(request.prompt_token_ids)), 0.0]
            return output
        done = len(self.tokenizer.encode(self.answers[index % len(self.answers)])) + 1 - len(ids)
        if self.refuse is not None:
            output.finish_reason, (output.error, output.error_param) = "error", self.refuse
            output.overloaded = self.overloaded
        elif done == self.fail_after:
            output.finish_reason, output.error = "error", "the step broke"
        else:
            output.new_token_ids = [ids.pop(0)]
            if params.logprobs is not None:
                best = [output.new_token_ids[0], 65, 66]
                output.logprobs = [PositionLogprobs(best, [-0.5, -1.0, float("-inf")], [1, 2, 3])]
            if not ids:
                output.finish_reason = "stop"
            elif done + 1 >= request.max_tokens:
                output.finish_reason = "length"
        if output.finish_reason is not None:
            del self._running[request_id, index]
        return output

    async def call(self, method: str, *arguments: Any) -> Any:
        raise NotImplementedError(method, arguments)

    async def close(self) -> None:
        return


class ScriptedLLM:
    """What the server needs of an AsyncLLM, over a ScriptedEngine."""

    def __init__(self, *, extensions: tuple[str, ...] = (), **server: Any) -> None:
        self.tokenizer = ByteTokenizer()
        self.engine = ScriptedEngine(self.tokenizer)
        self.config = EngineConfig(
            model={"model": "models/tiny"},
            scheduler={"max_num_seqs": 4},
            server={"access_log": False, **server},
            extensions=extensions,
        )
        eos = frozenset({self.tokenizer.eos_token_id})
        self.limits = ModelLimits(self.tokenizer.vocab_size, 512, eos_token_ids=eos, hidden_size=4)
        template = ChatTemplate(TEMPLATE, self.tokenizer.special_tokens)
        self.input_processor = InputProcessor(self.limits, self.tokenizer, template, self._grammars(eos))
        self.totals = RequestTotals(512)
        self._loop = AsyncRequestLoop(self.engine, OutputProcessor(self.tokenizer, self.totals))
        self.on_request_ended = self._loop.on_ended
        self.on_request_ended.append(self.totals.ended)

    def _grammars(self, eos: frozenset[int]) -> GrammarBackends:
        """Constraints are checked at the door, as they are for a real model."""
        registry = Registry.discover()
        size = self.limits.vocab_size
        return GrammarBackends("auto", registry, Environment(), lambda: TokenVocabulary.of(self.tokenizer, size, eos))

    @property
    def health(self) -> EngineHealth:
        return self.engine.health

    async def snapshot(self) -> Any:
        raise EngineError("scripted")

    @property
    def num_unfinished(self) -> int:
        return self._loop.num_unfinished

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        return SamplingParams(**changes)

    def submit(
        self,
        prompt: Any,
        params: SamplingParams,
        *,
        options: Any = None,
        timeout: Any = None,
        chat_arguments: Any = None,
        grammar: Any = None,
    ) -> Submission:
        arguments = render_arguments(**(chat_arguments or {}))
        prepared = self.input_processor.prepare(prompt, params, options, chat_arguments=arguments, grammar=grammar)
        return self._loop.submit(prepared, timeout)

    async def choose_grammar(self, params: SamplingParams) -> Any:
        return await asyncio.to_thread(self.input_processor.grammar_task, params)

    async def embed(self, prompt: Any, *, options: Any = None, timeout: Any = None, **fields: Any) -> EmbeddingOutput:
        params = EmbeddingParams(**fields)
        submission = self._loop.submit(self.input_processor.prepare_embedding(prompt, params, options), timeout)
        await submission.first()
        return params.output(await anext(submission))


class Served:
    """An application over a ScriptedLLM, called without sockets. Every call has an event loop of its own."""

    def __init__(self, llm: ScriptedLLM, registry: Registry) -> None:
        self.llm = llm
        self.engine = llm.engine
        self.app = create_app(llm, registry=registry)  # type: ignore[arg-type]
        self.context = self.app.state.server

    def run(self, use: Callable[[httpx.AsyncClient], Any]) -> Any:
        async def main() -> Any:
            self.engine._changed = asyncio.Event()
            transport = httpx.ASGITransport(self.app, client=("10.1.1.1", 4000))
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await asyncio.wait_for(use(client), 30)

        return asyncio.run(main())

    def call(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        return self.run(lambda client: client.request(method, path, **arguments))

    def post(self, path: str, body: Any = None, **arguments: Any) -> httpx.Response:
        return self.call("POST", path, json=body, **arguments)

    async def asgi_call(
        self, method: str, path: str, body: Any, send: Any, gone: Callable[[], Any] | None = None
    ) -> None:
        """One call of the bare application; the client goes away when `gone` returns, never without it."""
        pending = [json.dumps(body).encode()]

        async def receive() -> dict[str, Any]:
            if pending:
                return {"type": "http.request", "body": pending.pop(), "more_body": False}
            await (asyncio.Event().wait() if gone is None else gone())
            return {"type": "http.disconnect"}

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("10.1.1.1", 4000),
            "server": ("server", 80),
        }
        await self.app(scope, receive, send)

    def asgi(self, method: str, path: str, body: Any, send: Any = None, gone: Any = None) -> None:
        async def ignore(message: dict[str, Any]) -> None:
            del message

        self.run(lambda _: self.asgi_call(method, path, body, send or ignore, gone))

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})


@pytest.fixture(scope="session")
def registry() -> Registry:
    return Registry.discover()


@pytest.fixture
def served(registry: Registry) -> Served:
    return Served(ScriptedLLM(), registry)


@pytest.fixture(scope="session")
def make_served(registry: Registry) -> Callable[..., Served]:
    """As `serve`, for fixtures that last."""
    return lambda **settings: Served(ScriptedLLM(**settings), registry)


@pytest.fixture
def serve(registry: Registry) -> Callable[..., Served]:
    """Makes a server with other settings."""
    return lambda **settings: Served(ScriptedLLM(**settings), registry)


@pytest.fixture
def serve_with() -> Callable[..., Served]:
    """Makes a server with plugins and extensions of its own."""

    def make(registry: Registry, extensions: tuple[str, ...], server: dict[str, Any] | None = None) -> Served:
        return Served(ScriptedLLM(extensions=extensions, **(server or {})), registry)

    return make


def strict_json(text: str | bytes) -> Any:
    """Parsed by a parser that takes no NaN and no Infinity."""

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def read_events(response: httpx.Response) -> list[Any]:
    """The events of a stream, [DONE] checked and left out."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert blocks.pop() == "data: [DONE]"
    assert all(block.startswith("data: ") for block in blocks)
    return [strict_json(block[len("data: ") :]) for block in blocks]


@pytest.fixture(scope="session")
def parse() -> Callable[[str | bytes], Any]:
    return strict_json


@pytest.fixture(scope="session")
def events() -> Callable[[httpx.Response], list[Any]]:
    return read_events


@pytest.fixture(scope="session")
def refusal() -> Callable[[httpx.Response, int, str | None], str]:
    """Checks an error's form, status and param; its message."""

    def check(response: httpx.Response, status: int, param: str | None) -> str:
        assert response.status_code == status, response.text
        error = strict_json(response.content)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["code"], error["param"]) == (status, param), error
        assert isinstance(error["message"], str)
        assert "Traceback" not in error["message"]
        assert "<" + "class" not in error["message"]
        return str(error["message"])

    return check


# The real model


class Live:
    """A server over the real model, with a client that has the usual greedy defaults."""

    def __init__(self, llm: AsyncLLM, base_url: str, loop: asyncio.AbstractEventLoop) -> None:
        self.llm = llm
        self.base_url = base_url
        self.client = httpx.Client(base_url=base_url, timeout=120)
        self._loop = loop

    def on_loop(self, coroutine: Any) -> Any:
        """The result of a coroutine that runs where the server does."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, "temperature": 0, **fields})

    def chat(self, messages: Any, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **fields})

    def settled(self) -> Any:
        """The engine's numbers once nothing runs any more."""

        async def wait() -> Any:
            while (stats := await self.llm.stats()).num_unfinished:
                await asyncio.sleep(0.01)
            return stats

        return self.on_loop(wait())


@pytest.fixture(scope="session")
def live(smollm2_gguf: Path) -> Iterator[Live]:
    """The engine in a thread of this process; the server in another one, on a port of its own."""
    settings = {
        "served_model_names": ("smol", "alias"),
        "access_log": False,
        "enable_control_endpoints": True,
        "tool_parser": "hermes",
    }
    llm = AsyncLLM(
        smollm2_gguf,
        process=False,
        dtype="float32",
        max_model_len=1024,
        num_blocks=400,
        num_threads=1,
        compile_wait_s=60.0,  # tests may run on a machine that is busy with others
        server=settings,
    )
    app = create_app(llm)
    config = uvicorn_config(app, llm.config.server)
    config.port = 0
    ready = threading.Event()
    server = Server(config, app.state.server, 60.0, ready.set)
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()
        await llm.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="server")
    thread.start()
    try:
        assert ready.wait(60)
        port = server.servers[0].sockets[0].getsockname()[1]
        shared = Live(llm, f"http://127.0.0.1:{port}", loops[0])
        with shared.client:
            yield shared
    finally:
        server.should_exit = True
        thread.join(60)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test of the real server nothing runs in its engine, and all blocks are free."""
    yield
    if "live" in request.fixturenames:
        stats = request.getfixturevalue("live").settled()
        assert stats.num_free_blocks == stats.num_blocks


async def stream_lines(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line:
            yield line
