"""What is asked of a plugin of any kind: an honest front door, checked options, a start in any process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, requires
from time import perf_counter
from typing import Any

import pytest
from packaging.requirements import Requirement

from llmkit.errors import ConfigError
from llmkit.hookspecs.plugin import Environment
from llmkit.registry.options import validated_options
from llmkit.testing.conformance.child import ChildReport
from llmkit.testing.conformance.left_threads import left_threads
from llmkit.testing.conformance.target import Conformance

PROBLEMS_S = 0.5
ENVIRONMENTS = (
    Environment(),
    Environment(machine="aarch64", cpu_flags=frozenset({"asimd"})),
    Environment(platform="darwin", machine="arm64"),
    Environment(platform="win32", machine="AMD64"),
    Environment(device_type="cuda"),
    Environment(device_type="cuda", compute_capability=(7, 0)),
    Environment(device_type="cuda", compute_capability=(9, 0)),
)


def usable_or_skip(conformance: Conformance) -> None:
    """What follows builds the plugin's object."""
    if conformance.problems:
        pytest.skip("; ".join(conformance.problems))


def test_the_summary_is_one_line(conformance: Conformance) -> None:
    summary = conformance.info.summary
    assert summary.strip(), "info.summary is empty"
    assert summary == " ".join(summary.split()), "info.summary is one line for `llmkit plugins list`"
    assert len(summary) <= 120, "info.summary is one short line for `llmkit plugins list`"


def test_the_rank_is_a_number(conformance: Conformance) -> None:
    assert type(conformance.info.rank) is int
    assert type(conformance.info.auto) is bool


def test_requirements_can_be_read(conformance: Conformance) -> None:
    """`info.requires` and the distribution's own metadata, by PEP 508."""
    assert isinstance(conformance.info.requires, tuple), "info.requires is a tuple of texts"
    lines = list(conformance.info.requires)
    if conformance.plugin.row.installed:
        try:
            lines += requires(conformance.plugin.row.distribution) or []
        except PackageNotFoundError:
            pytest.fail(f"the distribution {conformance.plugin.row.distribution} has no metadata")
    for line in lines:
        Requirement(line)


def test_a_distribution_says_which_llmkit_it_goes_with(conformance: Conformance) -> None:
    row = conformance.plugin.row
    if not row.installed or row.builtin:
        pytest.skip("it is part of llmkit, or of no distribution")
    names = {Requirement(line).name.lower() for line in requires(row.distribution) or []}
    assert "llmkit" in names, f"{row.distribution} does not require llmkit, so no incompatibility would be noticed"


def test_problems_are_sentences(conformance: Conformance) -> None:
    """`llmkit_problems` answers for any machine, not only for this one."""
    hook = conformance.plugin.manager.hook.llmkit_problems
    for answer in (answer for environment in ENVIRONMENTS for answer in hook(environment=environment)):
        assert isinstance(answer, list), f"llmkit_problems returned a {type(answer).__name__}, not a list of texts"
        for problem in answer:
            assert isinstance(problem, str), f"a problem is a sentence, not {problem!r}"
            assert problem.strip(), "a problem is a sentence, not an empty text"


def test_problems_are_told_at_once(conformance: Conformance) -> None:
    """Every listing asks for them, and every choice of "auto"."""
    hook = conformance.plugin.manager.hook.llmkit_problems
    for environment in ENVIRONMENTS:
        least = min(_seconds(partial(hook, environment=environment)) for _ in range(3))
        assert least < PROBLEMS_S, f"llmkit_problems takes {least:.1f} s for {environment}"


def _seconds(call: Callable[[], object]) -> float:
    start = perf_counter()
    with contextlib.suppress(Exception):  # what it raises is another test's business
        call()
    return perf_counter() - start


def test_an_unknown_option_is_refused(conformance: Conformance) -> None:
    with pytest.raises(ConfigError, match=r"no_such_option|takes no options"):
        validated_options(conformance.plugin, {**conformance.given, "no_such_option": 1})
    model = conformance.info.options
    if model is not None:
        assert model.model_config.get("extra") == "forbid", f'{model.__name__} must have extra="forbid"'


def test_every_option_is_described(conformance: Conformance) -> None:
    model = conformance.info.options
    fields = {} if model is None else model.model_fields
    silent = [name for name, field in fields.items() if not (field.description or "").strip()]
    assert silent == [], "options without a description, which `llmkit plugins inspect` would show"


def test_defaults_are_valid(conformance: Conformance) -> None:
    """By the model's own rules, which pydantic does not apply to defaults."""
    model = conformance.info.options
    if model is None:
        return
    checked: Any = type(model.__name__, (model,), {"model_config": {"validate_default": True}})
    checked.model_validate(dict(conformance.given))


def test_options_can_be_written_to_a_file(conformance: Conformance) -> None:
    """They come from TOML, the environment and the command line, and go to child processes as JSON."""
    options = conformance.options
    if options is None:
        return
    text = json.dumps(options.model_dump(mode="json"))
    assert type(options).model_validate(json.loads(text)) == options


def test_it_is_built_anew_each_time(conformance: Conformance) -> None:
    if conformance.kind == "command":
        pytest.skip("a command is run once")
    usable_or_skip(conformance)
    first, second = conformance.create(), conformance.create()
    assert first is not second, "two engines in one process must not share an object"


def test_it_leaves_no_thread(conformance: Conformance) -> None:
    """Engines come and go in one process, and policies with them."""
    if conformance.kind == "command":
        pytest.skip("a command is run once")
    usable_or_skip(conformance)

    def use() -> None:
        close = getattr(conformance.create(), "close", None)
        if callable(close):
            close()

    left = left_threads(use)
    assert left == [], "threads that go on when its object is closed, if it can be, and dropped"


def test_its_times_are_recorded(conformance: Conformance) -> None:
    usable_or_skip(conformance)
    conformance.create()
    timing = conformance.timing
    assert timing.import_seconds is not None
    if conformance.kind != "extension":
        assert timing.create_seconds is not None


def test_it_loads_in_another_process(conformance_child: ChildReport) -> None:
    assert conformance_child.error is None, conformance_child.error


def test_it_is_built_in_another_process(conformance: Conformance, conformance_child: ChildReport) -> None:
    usable_or_skip(conformance)
    assert conformance_child.built == "built", f"there, its factory failed: {conformance_child.built}"


def test_the_front_door_imports_nothing_heavy(conformance_child: ChildReport) -> None:
    """Listing, inspecting and checking plugins must stay instant: heavy imports belong into the factory."""
    assert conformance_child.heavy == (), f"loading its front door imports {', '.join(conformance_child.heavy)}"


def test_no_import_touches_cuda(conformance_child: ChildReport) -> None:
    """A process that has initialised CUDA cannot fork, and a second one would hold memory on the GPU."""
    assert conformance_child.cuda == (), f"an import initialises CUDA:\n{conformance_child.cuda[0]}"
