"""`pytest --llmkit-conformance` and its setting: what is collected, and what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmkit.errors import ConfigError
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.registry import Registry
from llmkit.testing.conformance.collecting import _parameter, start
from llmkit.testing.conformance.naming import parse_targets

ROOT = Path(__file__).resolve().parents[2]


def pytest_in(folder, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def collected(folder, *arguments):
    """Names of modules and plugins among what is collected; the executor's suite needs no torch."""
    done = pytest_in(folder, "--collect-only", "--llmkit-device=cpu", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    names = re.findall(r"^([\w/.]+)::\w+(?:\[([\w:]+)\])?$", done.stdout, re.MULTILINE)
    return {plugin or module for module, plugin in names}


@pytest.fixture
def package(tmp_path):
    """A package that has its plugin on trial in a run of all tests."""
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\ntestpaths = ["tests"]\nllmkit_conformance = ["executor:inline"]\n'
    )
    (tmp_path / "tests" / "deep").mkdir(parents=True)
    for name in ("test_a.py", "deep/test_b.py"):
        (tmp_path / "tests" / name).write_text("def test_it():\n    assert True\n")
    return tmp_path


def test_without_the_flag_nothing_heavy_is_imported():
    code = "import sys, llmkit.testing.pytest_plugin; print([m for m in sys.modules if m in ('torch', 'pydantic')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


ALL = {"tests/test_a.py", "tests/deep/test_b.py"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), ALL | {"executor:inline"}),
        (("--llmkit-conformance=kernels:torch",), {"kernels:torch"}),
        (("--llmkit-conformance=kernels:torch", "tests/deep"), {"kernels:torch", "tests/deep/test_b.py"}),
    ],
)
def test_what_is_collected(package, arguments, expected):
    assert collected(package, *arguments) == expected


class Config:
    """What `start` looks at of pytest's configuration, for a run with `arguments`."""

    Args = pytest.Config.ArgsSource

    def __init__(self, folder, arguments=(), flags=(), options=(), settings=("executor:inline",)):
        self.args = list(arguments) or ["tests"]
        self.args_source = self.Args.ARGS if arguments else self.Args.TESTPATHS
        self.rootpath = folder
        self.invocation_params = SimpleNamespace(dir=folder)
        self.pluginmanager = SimpleNamespace(register=lambda *_: None)
        values = {"llmkit_conformance": list(flags), "llmkit_option": list(options), "llmkit_device": "cpu"}
        values["llmkit_timeout"] = 0.0
        self.getoption = values.__getitem__
        self.getini = {"llmkit_conformance": list(settings), "llmkit_options": [], "testpaths": ["tests"]}.__getitem__


@pytest.mark.parametrize(
    ("arguments", "tried"),
    [
        (("tests",), True),
        ((".",), True),
        (("tests/test_a.py", "tests/"), True),
        (("tests/test_a.py",), False),
        (("tests/test_a.py::test_it",), False),
        (("tests/deep",), False),
        (("elsewhere",), False),
    ],
)
def test_the_setting_counts_for_runs_of_all_tests(package, arguments, tried):
    config = Config(package, arguments)
    start(config)
    assert config.args[: len(arguments)] == list(arguments)
    assert [Path(path).name for path in config.args[len(arguments) :]] == ["common_suite.py"] * tried


def test_without_flag_or_setting_nothing_is_added(package):
    config = Config(package, settings=())
    start(config)
    assert config.args == ["tests"]


def test_a_whole_run_reports_what_the_plugins_take(package):
    done = pytest_in(package, "--llmkit-conformance=weights:dummy", "--llmkit-conformance=executor:inline")
    assert done.returncode == 0, done.stdout
    assert re.search(r"^weights:dummy \(llmkit .*\): import [\d.]+ ms, create [\d.]+ ms$", done.stdout, re.MULTILINE)
    assert re.search(r"^executor:inline \(llmkit .*\): import ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("flags", "options", "message"),
    [
        (["scheduler:no-such"], [], "There is no scheduler plugin 'no-such'"),
        (["scheduler:no_such_module:x"], [], "There is no scheduler plugin 'no_such_module:x'"),
        (["scheduler:json:loads"], [], "has no `info`"),
        (["policy:fcfs"], [], "'policy:fcfs' is not of the form KIND:NAME"),
        (["scheduler"], [], "'scheduler' is not of the form KIND:NAME"),
        (["scheduler:auto"], [], "names no plugin"),
        (["distribution:nobody"], [], "No distribution 'nobody' with plugins is installed"),
        (["scheduler:fcfs"], ["x=1"], "takes no options"),
        (["scheduler:priority"], ["aging_s=fast"], "aging_s"),
    ],
)
def test_a_usage_error_says_what_is_wrong(package, flags, options, message):
    with pytest.raises(pytest.UsageError, match=re.escape(message)):
        start(Config(package, flags=flags, options=options))


def test_a_usage_error_is_one_paragraph(tmp_path):
    done = pytest_in(tmp_path, "--llmkit-conformance=scheduler:no-such")
    assert done.returncode == 4
    assert done.stderr.startswith("ERROR: llmkit conformance: There is no scheduler plugin 'no-such'.")
    assert "Traceback" not in done.stderr


GPU_ONLY = SimpleNamespace(
    info=PluginInfo(summary="needs a GPU"),
    llmkit_scheduler_policy=hookimpl(lambda: None),
    llmkit_problems=hookimpl(lambda environment: ["it needs CUDA"] if environment.device_type == "cpu" else []),
)


def test_one_that_cannot_work_here_is_refused_by_the_flag_and_left_alone_by_the_setting(package, monkeypatch):
    monkeypatch.setitem(sys.modules, "gpu_only_plugin", GPU_ONLY)
    monkeypatch.setattr(GPU_ONLY, "__spec__", ModuleSpec("gpu_only_plugin", None), raising=False)
    with pytest.raises(pytest.UsageError, match=r"it needs CUDA\. Try it on a machine"):
        start(Config(package, flags=["scheduler:gpu_only_plugin:"]))
    (target,) = parse_targets(["scheduler:gpu_only_plugin:"], [], "cpu")
    assert target.problems == ("it needs CUDA",)
    assert _parameter(target, "common_suite").marks == []
    (mark,) = _parameter(target, "scheduler_suite").marks
    assert mark.kwargs == {"reason": "it needs CUDA"}


def test_options_go_to_the_plugin_they_name():
    priority, fcfs = parse_targets(
        ["scheduler:priority", "scheduler:fcfs", "scheduler:priority"], ["scheduler.priority.aging_s=3"], "cpu"
    )
    assert (priority.name, priority.given, priority.options.aging_s) == ("priority", {"aging_s": 3}, 3)
    assert (fcfs.name, fcfs.given, fcfs.options) == ("fcfs", {}, None)
    assert priority.with_options(aging_s=9).options.aging_s == 9
    settings = ["scheduler.priority.aging_s=9", "connector.none_such.key=1"]
    assert parse_targets(["scheduler:priority"], [], "cpu", settings)[0].options.aging_s == 9
    (only,) = parse_targets(["scheduler:priority"], ["aging-s=7"], "cpu")
    assert only.options.aging_s == 7
    assert only.create().starvation_bound_s == 2 * 100 * 7


@pytest.mark.parametrize("text", ["aging_s=1", "aging_s", "=1"])
def test_an_option_that_could_be_anybody_s_is_refused(text):
    with pytest.raises(ConfigError, match=r"could be of any|not of the form"):
        parse_targets(["scheduler:priority", "scheduler:fcfs"], [text], "cpu")


def test_a_run_of_all_our_tests_tries_every_plugin_of_ours():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert settings["llmkit_conformance"] == ["distribution:llmkit"]
    targets = parse_targets(settings["llmkit_conformance"], [], "cpu", settings["llmkit_options"])
    ours = {(row.kind, row.name) for row in Registry.discover().find() if row.builtin}
    assert {(target.kind, target.name) for target in targets} == ours
