"""What the GPU benchmarks compare by, on known numbers; they themselves run on a GPU."""

from __future__ import annotations

import importlib
import math
import sys
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Loads a command as Python does that runs it: its folder first on the path, gone afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    own = {path.stem for path in FOLDER.glob("*.py")}
    for name in own & (set(sys.modules) - before):
        del sys.modules[name]


def texts(*shapes: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.randn(shape) * 3 for shape in shapes]


def test_differences_of_logits(command: Any) -> None:
    expected = texts((5, 11), (2, 11))
    moved = [logits.clone() for logits in expected]
    moved[1][0, 3] += 0.5
    same = command("differences").difference(expected, expected)
    assert (same.divergence, same.largest, same.mean, same.same_best) == (0, 0, 0, 1)
    found = command("differences").difference(expected, moved)
    right, wrong = expected[1][0].double().log_softmax(-1), moved[1][0].double().log_softmax(-1)
    kl = float((right.exp() * (right - wrong)).sum())
    assert found.divergence == pytest.approx(kl / 7)
    assert found.each == pytest.approx((0, kl / 2))
    assert found.spread == pytest.approx(kl / 2 / math.sqrt(2) / math.sqrt(2))
    assert found.largest == pytest.approx(0.5, rel=1e-4)
    assert found.mean == pytest.approx(0.5 / 11 / 7, rel=1e-4)
    assert found.fewer(found) == 0
    assert same.fewer(found) == 1


def test_constants_added_to_logits_are_no_divergence_and_the_best_token_counts(command: Any) -> None:
    (expected,) = texts((4, 9))
    found = command("differences").difference([expected], [expected + 1])
    assert found.divergence == pytest.approx(0, abs=1e-6)
    assert found.largest == pytest.approx(1, rel=1e-3)
    assert found.same_best == 1
    assert math.isnan(found.spread)
    other = expected.clone()
    other[0, int(expected[0].argmin())] = 100
    assert command("differences").difference([expected], [other]).same_best == 0.75


def test_by_how_much_the_lead_of_the_best_token_changes(command: Any) -> None:
    expected = torch.tensor([[1.0, 5.0, 3.0], [9.0, 0.0, 8.0]])
    moved = torch.tensor([[9.0, 5.5, 3.0], [9.0, 0.0, 9.5]])
    noise = command("differences").margin_noise([expected], [moved])
    assert noise.tolist() == [0.5, 1.5]  # 2 became 2.5, and 1 became -0.5


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([], [], None)],
)
def test_where_answers_differ_first(command: Any, one: list[int], other: list[int], place: int | None) -> None:
    assert command("differences").first_difference(one, other) == place


def test_answers_may_differ_where_tokens_are_as_close_as_the_type_makes_them(command: Any) -> None:
    greedy = command("greedy_tokens")
    subject = greedy.Subject("model", [[7], [7, 7]])
    expected = [[1, 2], [0, 1]]
    closeness = greedy.Closeness.__new__(greedy.Closeness)
    closeness._subject, closeness._expected, closeness._leads, closeness._limit = subject, expected, None, 0.25
    logits = torch.zeros(4, 3)
    logits[1] = torch.tensor([0.0, 1.0, 1.2])  # of the second token of the first answer
    closeness._logits = [logits, torch.zeros(4, 3)]
    assert closeness.judge(greedy.Answers("one", "graphs", expected))
    assert closeness.judge(greedy.Answers("one", "graphs", [[1, 1], [0, 1]]))
    assert not closeness.judge(greedy.Answers("one", "graphs", [[1, 0], [0, 1]]))
    assert not closeness.judge(greedy.Answers("one", "graphs", [[1], [0, 1]])), "one has ended"


def test_in_float32_the_file_says_how_close_tokens_are(command: Any) -> None:
    greedy = command("greedy_tokens")
    subject = greedy.Subject("model", [[7]], {}, [[1, 2]], [[0.5, 1e-4]])
    closeness = greedy.Closeness(subject, subject.expected, "float32", "cpu")
    assert closeness.judge(greedy.Answers("one", "graphs", [[1, 0]]))
    assert not closeness.judge(greedy.Answers("one", "graphs", [[0, 2]]))


@pytest.mark.parametrize("wrong", [None, "opened_model", "of_engine"])
def test_accuracy_tells_of_variants_that_failed(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, wrong: str | None
) -> None:
    accuracy = command("accuracy")
    answers = tmp_path / "answers.json"
    answers.write_text('{"items": [{"prompt_token_ids": [1, 2], "output_token_ids": [3]}]}')
    logits = texts((3, 5))

    def fails_in_float8(name: str) -> Any:
        """An engine is its variant here."""

        def call(*arguments: Any, **settings: Any) -> Any:
            variant = settings.get("quantization", "none") if name == "opened_model" else arguments[0].variant
            if wrong == name and variant == "fp8":
                raise RuntimeError("no such format")
            return nullcontext(SimpleNamespace(variant=variant)) if name == "opened_model" else logits

        return call

    for name in ("opened_model", "of_engine"):
        monkeypatch.setattr(accuracy, name, fails_in_float8(name))
    monkeypatch.setattr(accuracy, "of_hugging_face", lambda *_, **__: logits)
    arguments = [str(answers), "--device", "cpu", "--dtype", "float32", "--variants", "fp8 weights", "fp8 cache"]
    monkeypatch.setattr(sys, "argv", ["accuracy.py", *arguments])
    with pytest.raises(SystemExit) as end:
        accuracy.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| llmkit")]
    assert len(rows) == 3, "a variant that fails leaves the others their turn"
    assert [("FAILED RuntimeError: no such format" in row) for row in rows] == [False, wrong is not None, False]
    assert end.value.code == (0 if wrong is None else 1)


class Engine:
    """Answers are functions of seed and prompt; those of batches that are not alone begin with another token."""

    def __init__(self, *, moody: bool) -> None:
        self.sizes: list[int] = []
        self.moody = moody

    def generate(self, prompts: list[Any], params: list[Any], *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.sizes.append(len(prompts))
        first = int(self.moody and len(prompts) > 1)
        return [
            SimpleNamespace(outputs=[SimpleNamespace(token_ids=[first, each.seed, *prompt["prompt_token_ids"]])])
            for prompt, each in zip(prompts, params, strict=True)
        ]


@pytest.mark.parametrize("moody", [False, True])
def test_seeded_answers_are_put_back_in_their_order(
    command: Any, capsys: pytest.CaptureFixture[str], moody: bool
) -> None:
    draws, engine = command("seeded_draws"), Engine(moody=moody)
    requests = [([i, i + 1], draws.seeded(i, {})) for i in range(20)]
    draws.compare(engine, "type", requests)
    assert engine.sizes == [1] * 20 + [7] * 3 + [64]
    said = capsys.readouterr().out
    assert said.count(f"{0 if moody else 20} of 20 answers equal") == 2
    assert ("first differences after [0, 0" in said) == moody


def test_graphs_of_steps_in_which_all_get_a_token_are_timed(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    idle = command("idle")
    clock = count()

    class Event:
        def __init__(self, **_: object) -> None:
            self.at = 0

        def record(self) -> None:
            self.at = next(clock)

        def elapsed_time(self, later: Event) -> int:
            return later.at - self.at

    monkeypatch.setattr(idle.torch.cuda, "Event", Event)
    captured = SimpleNamespace(graph=SimpleNamespace(replay=lambda: next(clock)))

    class Graphs:
        _steps = {1: captured, 2: SimpleNamespace(graph=None)}  # noqa: RUF012

        def run(self, plan: Any, pages: int, ending: str) -> str | None:
            assert pages == 1
            if plan.num_rows > 9:
                return None
            captured.graph.replay()
            return ending

    graphs, raw = Graphs(), captured.graph
    llm = SimpleNamespace(
        engine=SimpleNamespace(
            core=SimpleNamespace(
                executor=SimpleNamespace(_worker=SimpleNamespace(_runner=SimpleNamespace(_graphs=graphs)))
            )
        )
    )

    def steps_of(*, timed: bool) -> Any:
        with idle.decode_steps(llm, 4, timed=timed) as steps:
            for rows in (4, 4, 2, 10, 4, 4, 4):
                assert graphs.run(SimpleNamespace(num_rows=rows), 1, "ending") == (None if rows == 10 else "ending")
        assert captured.graph is raw
        assert "run" not in vars(graphs)
        return steps

    plain, steps = steps_of(timed=False), steps_of(timed=True)
    assert (len(steps.launched), len(plain.launched)) == (5, 5)
    assert (len(steps.runs), plain.runs) == (5, [])
    found = idle.idle(steps.runs)
    assert (found.graphs, found.gaps) == ([2, 2], [1, 1])
    assert found.part == pytest.approx(1 / 3)
    assert idle.described([found], [1.0, 3.0]).startswith("idle 33.33% [33.33% - 33.33%]; a graph takes 2.000 ms")
    assert idle.intervals([0.0, 0.5, 1.0, 1.002, 1.005]) == pytest.approx([2, 3])


@pytest.mark.parametrize("attention", ["attention_kernel", "decode_kernel"])
def test_what_a_layer_is_made_of(command: Any, attention: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Six layers of attention and two products, whose ends are 4, 3 and 2 µs apart; the head stands between two."""
    layer = command("layer")
    three_layers = [attention, "first", "second"] * 3
    names = [*three_layers, "head", *three_layers]
    ends, now = [], 0.0
    for name in names:
        now += {attention: 4.0, "first": 3.0, "second": 2.0, "head": 80.0}[name]
        ends.append(now)
    layer.print_layer(list(zip(names, ends, strict=True)), "title")
    lines = capsys.readouterr().out.split("\n")
    assert lines[0] == "title: 9.00 µs a layer of 3 kernels, median of 4"
    assert [line.split() for line in lines[1:4]] == [["3.00", "first"], ["2.00", "second"], ["4.00", attention]]
    with pytest.raises(SystemExit, match="no kernels named"):
        layer.print_layer([("first", 1.0), ("second", 2.0)], "title")
