"""Engine processes around a fake engine: they start in a tenth of a second."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from llmkit.config import EngineConfig
from llmkit.config.sections import ProcessConfig
from llmkit.engine.process import messages
from llmkit.engine.process.engine_process import Launch
from llmkit.engine.process_client import ProcessClient
from llmkit.requests.message import EngineRequest
from llmkit.requests.sampling_params import SamplingParams
from llmkit.testing.fake_engine import FakeBuilder, fake_tokens


def make_request(name: str, num_tokens: int = 8, prompt: tuple[int, ...] = (1, 2), **params: Any) -> EngineRequest:
    sampling = SamplingParams(**({"seed": 0, "max_tokens": num_tokens} | params))
    return EngineRequest(
        request_id=name, prompt_token_ids=list(prompt), max_tokens=num_tokens, sampling_params=sampling
    )


class Running:
    """A client whose outputs are gathered: (request id, index) → tokens; ends, errors and their fields by that key."""

    def __init__(self, client: ProcessClient) -> None:
        self.client = client
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], str] = {}
        self.errors: dict[tuple[str, int], str] = {}
        self.params: dict[tuple[str, int], str | None] = {}

    def add(self, *requests: EngineRequest) -> None:
        self.client.add(requests)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Take outputs until `condition` holds."""
        while not condition():
            for output in await asyncio.wait_for(self.client.outputs(), 30):
                key = output.request_id, output.index
                assert key not in self.ends, f"news of {key} after its end"
                self.tokens.setdefault(key, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.ends[key] = output.finish_reason
                    self.errors[key], self.params[key] = output.error or "", output.error_param

    async def until_ended(self, *names: str, n: int = 1) -> None:
        await self.until(lambda: all((name, index) in self.ends for name in names for index in range(n)))

    async def until_tokens(self, name: str, count: int) -> None:
        await self.until(lambda: len(self.tokens.get((name, 0), ())) >= count)

    def kill(self, number: int = 9) -> None:
        pid = self.client.pid
        assert pid is not None
        os.kill(pid, number)

    def check(self, *requests: EngineRequest) -> None:
        """Every sequence has exactly the tokens of an undisturbed run."""
        for request in requests:
            for index in range(request.sampling_params.n):
                seed = (request.sampling_params.seed or 0) + index
                key = request.request_id, index
                assert self.tokens[key] == fake_tokens(request.prompt_token_ids, seed, request.max_tokens)
                assert self.ends[key] == "length"


@pytest.fixture
def request_of() -> Callable[..., EngineRequest]:
    return make_request


@pytest.fixture
def running() -> Callable[..., Any]:
    """run(scenario, builder, **settings of the section process): start a client, run `scenario(Running)`, close it."""

    def run(scenario: Callable[[Running], Any], builder: FakeBuilder | None = None, **settings: Any) -> None:
        config = EngineConfig(process=ProcessConfig(**settings))
        client = ProcessClient(Launch(messages.dumped(builder or FakeBuilder(step_s=0.002))), config)
        client.start()

        async def main() -> None:
            try:
                await scenario(Running(client))
            finally:
                await client.close()

        asyncio.run(main())

    return run
