"""Engines with the real model, loaded as rarely as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmkit import LLM, CompletionOutput, RequestOutput, SamplingParams

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs the model."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.model)


# Ids of the model's own vocabulary, and what greedy decoding answers (float32).
G1 = "The English alphabet: A B C D E F G"
G1_IDS = [407, 339, 659, 450, 377, 1606, 428, 334, 312, 514, 717, 1777]
G2 = "Counting: one, two, three, four, five,"
G2_IDS = [2976, 28, 4962, 28, 4475, 28, 7462, 28, 3772, 28]
G3 = "ha ha ha ha ha ha ha ha"
G3_IDS = [88, 421, 421, 421, 421, 421, 421, 421]
G4 = [{"role": "user", "content": "What is 2+2? Answer with one number."}]
G4_IDS = [504, 2988, 314, 216, 36, 30, 2]


class Facts:
    """Prompts with known greedy answers."""

    g1, g1_ids, g2, g2_ids, g3, g3_ids, g4, g4_ids = G1, G1_IDS, G2, G2_IDS, G3, G3_IDS, G4, G4_IDS


@pytest.fixture(scope="session")
def facts() -> type[Facts]:
    return Facts


@pytest.fixture(scope="session")
def settings() -> dict[str, Any]:
    """What all engines here have in common: the arithmetic of the reference, and a cache of known size.

    One thread: threads that wait for one another stand still on a machine that is busy with something else.
    """
    return {"dtype": "float32", "max_model_len": 1024, "num_blocks": 400, "num_threads": 1}


@pytest.fixture(scope="session")
def llm(smollm2_gguf: Path, settings: dict[str, Any]) -> Iterator[LLM]:
    """The engine that most tests share. They must leave nothing running in it."""
    with LLM(smollm2_gguf, **settings) as shared:
        yield shared


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test the shared engine has no request, and all its blocks are free."""
    yield
    if "llm" in request.fixturenames:
        stats = request.getfixturevalue("llm").stats()
        assert stats.num_unfinished == 0
        assert stats.num_free_blocks == stats.num_blocks


@pytest.fixture
def make_llm(smollm2_gguf: Path, settings: dict[str, Any]) -> Iterator[Callable[..., LLM]]:
    """Builds an engine with other settings; closed after the test."""
    opened: list[LLM] = []

    def make(model: Path = smollm2_gguf, **changes: Any) -> LLM:
        opened.append(LLM(model, **(settings | changes)))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **params)


@pytest.fixture(scope="session")
def ids() -> Callable[..., list[int]]:
    """Token ids of the first answer to a prompt."""

    def run(llm: LLM, prompt: Any, **params: Any) -> list[int]:
        return list(llm.generate(prompt, SamplingParams(**params))[0].outputs[0].token_ids)

    return run


@pytest.fixture(scope="session")
def check_golden(golden: list[dict[str, Any]]) -> Callable[..., None]:
    """Compares greedy answers to all golden prompts, or those of a slice, with the reference, token for token.

    A difference is right only where the reference's own two best logits are within 1e-3; what follows it is then
    another text and is not compared.
    """

    def check(outputs: list[RequestOutput], part: slice = slice(None)) -> None:
        assert len(outputs) == len(golden[part])
        for item, output in zip(golden[part], outputs, strict=True):
            assert output.error is None
            for answer in output.outputs:
                check_answer(answer, item)

    def check_answer(answer: CompletionOutput, item: dict[str, Any]) -> None:
        expected = item["output_token_ids"]
        pairs = enumerate(zip(answer.token_ids, expected, strict=False))
        differs = next((i for i, (mine, theirs) in pairs if mine != theirs), None)
        if differs is not None:
            assert item["top2_margin"][differs] < 1e-3, (item["prompt"], differs)
            return
        assert answer.token_ids == expected
        assert (answer.finish_reason, answer.text) == (item["finish_reason"], item["text"])

    return check


@pytest.fixture(scope="session")
def golden_prompts(golden: list[dict[str, Any]]) -> list[list[int]]:
    return [item["prompt_token_ids"] for item in golden]


GOLDEN_PARAMS = greedy(max_tokens=64)


@pytest.fixture(scope="session")
def golden_params() -> SamplingParams:
    return GOLDEN_PARAMS
