"""Names, conflicts, options, and what `auto` takes."""

from __future__ import annotations

from typing import Any

import pytest

from llmkit.config import PluginsConfig
from llmkit.errors import ConfigError, PluginChoiceError, PluginError
from llmkit.hookspecs.attention import Support
from llmkit.registry import Registry

GROUP = "llmkit.schedulers"


def add(site: Any, name: str, info: str = "'x'", body: str = "", plugin: str | None = None) -> None:
    module = name.replace("-", "_")
    site.add_policy(module, info, body)
    site.add_distribution(name, {GROUP: {plugin or module: module}})


# ---- names


@pytest.mark.usefixtures("site")
def test_unknown_name_lists_the_valid_ones_with_a_guess(cpu: Any) -> None:
    pattern = r"no scheduler plugin 'priorty'\. Did you mean 'priority'\?.*Installed: .*fcfs.*priority"
    with pytest.raises(PluginError, match=pattern):
        Registry.discover().create("scheduler", "priorty", cpu)


def test_unknown_kind(cpu: Any) -> None:
    with pytest.raises(PluginError, match="no plugin kind 'policy'"):
        Registry.discover().create("policy", "fcfs", cpu)


def test_two_distributions_with_one_name(site: Any, cpu: Any) -> None:
    """A dict would silently keep the last one."""
    add(site, "llmkit-one", plugin="lottery")
    add(site, "llmkit-two", plugin="lottery")
    registry = Registry.discover()
    assert {row.state for row in registry.find("scheduler") if row.name == "lottery"} == {"conflict"}
    with pytest.raises(
        PluginError, match=r"llmkit-one 1\.0 .*llmkit-two 1\.0.*llmkit-one:lottery or llmkit-two:lottery"
    ):
        registry.create("scheduler", "lottery", cpu)
    for distribution in ("llmkit-one", "LLMKIT_Two"):
        made = registry.create("scheduler", f"{distribution}:lottery", cpu)
        assert made.made_by == distribution.lower().replace("-", "_")


def test_a_foreign_package_cannot_take_a_built_in_name(site: Any, cpu: Any) -> None:
    add(site, "llmkit-thief", plugin="fcfs")
    registry = Registry.discover()
    with pytest.raises(PluginError, match="offered more than once"):
        registry.create("scheduler", "fcfs", cpu)
    assert type(registry.create("scheduler", "llmkit:fcfs", cpu)).__module__.startswith("llmkit_schedulers")
    assert type(registry.create("scheduler", "auto", cpu)).__module__.startswith("llmkit_schedulers")


def test_disabling_one_side_ends_a_conflict(site: Any, cpu: Any) -> None:
    add(site, "llmkit-one", plugin="lottery")
    add(site, "llmkit-two", plugin="lottery")
    registry = Registry.discover(PluginsConfig(disable=("scheduler:llmkit-one:lottery",)))
    assert registry.create("scheduler", "lottery", cpu).made_by == "llmkit_two"


# ---- auto


def test_auto_takes_only_built_in_plugins_by_default(site: Any, cpu: Any) -> None:
    add(site, "llmkit-best", "'x', rank=1000")
    registry = Registry.discover()
    registry.create("scheduler", "auto", cpu)
    selection = registry.selections[-1]
    assert selection.distribution == "llmkit"
    assert selection.choice == "auto"
    assert "plugins.auto" in selection.rejected["llmkit-best:llmkit_best"]


def test_auto_any_takes_the_highest_rank_and_says_why_not_the_others(site: Any, cpu: Any) -> None:
    add(site, "llmkit-best", "'x', rank=1000")
    add(site, "llmkit-shy", "'x', rank=2000, auto=False")
    add(site, "llmkit-needy", "'x', rank=3000, requires=('no-such-library',)")
    add(site, "llmkit-broken", "'x', rank=4000", body="raise ValueError('no')\n")
    failing = "@hookimpl\ndef llmkit_scheduler_policy(): raise OSError('full')\n"
    add(site, "llmkit-failing", "'x', rank=5000", body=failing)
    registry = Registry.discover(PluginsConfig(auto="any"))
    assert registry.create("scheduler", "auto", cpu).made_by == "llmkit_best"
    selection = registry.selections[-1]
    assert selection.reason == "the best of 6 usable ones (rank 1000: x)"
    assert selection.rejected["llmkit_shy"] == "it is used only when named"
    assert "no-such-library" in selection.rejected["llmkit_needy"]
    assert "ValueError: no" in selection.rejected["llmkit_broken"]
    assert "OSError: full" in selection.rejected["llmkit_failing"]
    assert selection.rejected["fcfs"].startswith("llmkit_best has rank 1000, this rank 10: first come, first served")


def test_auto_prefers_score_then_rank_then_built_in_then_name(site: Any, cpu: Any) -> None:
    for name in ("llmkit-a", "llmkit-b"):
        add(site, name, "'x', rank=700")
    registry = Registry.discover(PluginsConfig(auto="any"))
    assert registry.create("scheduler", "auto", cpu).made_by == "llmkit_a"
    scores = {"llmkit_b": Support(score=3), "llmkit_a": Support(reasons=("too small a head",))}

    def judge(policy: Any) -> Support:
        return scores.get(getattr(policy, "made_by", ""), Support(score=1))

    assert registry.create("scheduler", "auto", cpu, judge=judge).made_by == "llmkit_b"
    selection = registry.selections[-1]
    assert selection.rejected["llmkit_a"] == "too small a head"
    assert "llmkit_b has score 3" in selection.rejected["fcfs"]


def test_judge_of_a_named_plugin(cpu: Any) -> None:
    registry = Registry.discover()
    with pytest.raises(PluginError, match=r"'fcfs' \(llmkit .*cannot be used: head size 7 is odd"):
        registry.create("scheduler", "fcfs", cpu, judge=lambda _: Support(reasons=("head size 7 is odd",)))

    def failing(_: object) -> Support:
        raise ZeroDivisionError("oops")

    with pytest.raises(PluginError, match=r"failed when asked.*ZeroDivisionError"):
        registry.create("scheduler", "fcfs", cpu, judge=failing)
    assert registry.selections == []


def test_nothing_usable_says_why_for_each(cpu: Any) -> None:
    with pytest.raises(PluginError, match=r"No scheduler plugin can be used.*fcfs: not today.*priority: not today"):
        Registry.discover().create("scheduler", "auto", cpu, judge=lambda _: Support(reasons=("not today",)))


# ---- options

OPTIONS = """
from pydantic import BaseModel

class Options(BaseModel):
    aging_s: float = 0.0
    queues: list[str] = []
"""


def with_options(site: Any, options: dict[str, Any], info: str = "'x', options=Options") -> Registry:
    site.add_policy("optional", info, before=OPTIONS)
    site.add_distribution("llmkit-optional", {GROUP: {"optional": "optional"}})
    return Registry.discover(PluginsConfig(options={"scheduler": options}))


def test_options_are_validated_by_the_plugins_model(site: Any, cpu: Any) -> None:
    registry = with_options(site, {"optional": {"aging-s": "10", "queues": ["a"]}})
    options = registry.create("scheduler", "optional", cpu).options
    assert (options.aging_s, options.queues) == (10.0, ["a"])


def test_options_default(site: Any, cpu: Any) -> None:
    assert with_options(site, {}).create("scheduler", "optional", cpu).options.aging_s == 0.0


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"agin_s": 1}, r"plugins\.scheduler\.optional\.agin_s\. Did you mean aging_s\? Valid: aging_s, queues"),
        ({"aging_s": "old"}, r"plugins\.scheduler\.optional\.aging_s: Input should be a valid number.*'old'"),
        ({"aging_s": 1, "aging-s": 2}, "given twice"),
    ],
)
def test_bad_options(site: Any, cpu: Any, options: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        with_options(site, {"optional": options}).create("scheduler", "optional", cpu)


def test_options_of_a_plugin_without_any(site: Any, cpu: Any) -> None:
    with pytest.raises(ConfigError, match="takes no options"):
        with_options(site, {"optional": {"x": 1}}, info="'x'").create("scheduler", "optional", cpu)


def test_options_of_a_plugin_that_is_not_installed(site: Any, cpu: Any) -> None:
    registry = with_options(site, {"optinal": {"aging_s": 1}})
    with pytest.raises(ConfigError, match=r"plugins\.scheduler\.optinal, but there is no such plugin.*optional"):
        registry.create("scheduler", "fcfs", cpu)
    with pytest.raises(ConfigError, match="no such plugin"):
        registry.check_options()


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("optional", r"plugins\.scheduler\.optional\.agin_s\. Did you mean aging_s"),
        ("llmkit-optional:optional", r"plugins\.scheduler\.optional\.agin_s\. Did you mean aging_s"),
        ("optional:", r"plugins\.scheduler\.optional:\.agin_s\. Did you mean aging_s"),
        ("llmkit-absent:optional", r"plugins\.scheduler\.llmkit-absent:optional, but there is no such plugin"),
    ],
)
def test_options_of_a_plugin_that_is_not_chosen_are_checked_too(site: Any, cpu: Any, name: str, pattern: str) -> None:
    registry = with_options(site, {name: {"agin_s": 1}})
    with pytest.raises(ConfigError, match=pattern):
        registry.create("scheduler", "fcfs", cpu)
    with pytest.raises(ConfigError, match=pattern):
        registry.check_options()


def test_options_without_effect_are_known(site: Any, cpu: Any) -> None:
    registry = with_options(site, {"optional": {"aging_s": 1}})
    registry.create("scheduler", "fcfs", cpu)
    assert registry.options_without_effect() == ["plugins.scheduler.optional"]
    registry.create("scheduler", "optional", cpu)
    assert not registry.options_without_effect()


def test_options_of_a_broken_plugin_that_is_not_chosen_stop_nobody(
    site: Any, cpu: Any, caplog: pytest.LogCaptureFixture
) -> None:
    registry = with_options(site, {"optional": {"aging_s": 1}}, info="1 / 0")
    registry.create("scheduler", "fcfs", cpu)
    assert "plugins.scheduler.optional" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("choice", ["nope", "fcfs:nope", "llmkit-absent:fcfs"])
def test_a_choice_that_cannot_be_meant_is_a_fault_of_the_settings(cpu: Any, choice: str) -> None:
    with pytest.raises(PluginChoiceError, match="There is no scheduler plugin") as caught:
        Registry.discover().create("scheduler", choice, cpu)
    assert isinstance(caught.value, ConfigError)


def test_options_by_distribution(site: Any, cpu: Any) -> None:
    registry = with_options(site, {"llmkit-optional:optional": {"aging_s": 3}})
    assert registry.create("scheduler", "optional", cpu).options.aging_s == 3.0
