"""`llmkit plugins new`: names and folders that will do and that will not; tests/packaging tries what it writes."""

from __future__ import annotations

import ast
import tomllib

import pytest

from llmkit.errors import ConfigError
from llmkit.hookspecs.kinds import KINDS
from llmkit_cli.commands.plugins_new import pairs_of
from llmkit_cli.main import main
from llmkit_cli.scaffold.naming import MAX_LENGTH, package_names
from llmkit_cli.scaffold.package import kinds_with_template, write_package

KIND_NAMES = kinds_with_template()
LONGEST = "x" * MAX_LENGTH


@pytest.fixture
def llmkit(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        output = capsys.readouterr()
        return exit_info.value.code or 0, output.out, output.err

    return run


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_one_plugin_makes_a_package_named_after_it(llmkit, tmp_path):
    code, out, _ = llmkit("plugins", "new", "scheduler", "my-policy", "--dir", str(tmp_path / "deep"))
    folder = tmp_path / "deep" / "llmkit-my-policy"
    assert code == 0
    assert f"pip install -e '{folder}[dev]'" in out
    files = contents(folder)
    assert set(files) == {
        "pyproject.toml",
        "README.md",
        ".gitignore",
        ".github/workflows/tests.yml",
        "src/llmkit_my_policy/__init__.py",
        "src/llmkit_my_policy/py.typed",
        "src/llmkit_my_policy/my_policy/__init__.py",
        "src/llmkit_my_policy/my_policy/options.py",
        "src/llmkit_my_policy/my_policy/policy.py",
        "tests/test_my_policy.py",
    }
    assert all(file in out for file in files)
    project = tomllib.loads(files["pyproject.toml"])
    assert project["project"]["entry-points"] == {"llmkit.schedulers": {"my-policy": "llmkit_my_policy.my_policy"}}
    assert project["project"]["dependencies"] == ["llmkit>=0.1,<0.2"]
    assert project["tool"]["pytest"]["ini_options"]["llmkit_conformance"] == ["scheduler:my-policy"]
    assert "| scheduler | `my-policy` | `--scheduler my-policy` |" in files["README.md"]


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_names_of_any_length_and_form_leave_code_that_parses_and_lines_that_fit(kind, tmp_path):
    for name in ("a", "9", "class", "A.b_c-D", LONGEST):
        package = f"{name}-p"[-MAX_LENGTH:]
        names = package_names([(kind, name)], None if name in ("a", "9") else package, KIND_NAMES)
        write_package(names, tmp_path / name)
        for path, text in contents(tmp_path / name).items():
            assert "\u00ab" not in text
            assert "\u00bb" not in text
            if path.endswith(".py"):
                ast.parse(text)
                assert max(map(len, text.splitlines()), default=0) <= 120, path
            if path.endswith(".toml"):
                (points,) = tomllib.loads(text)["project"]["entry-points"].values()
                assert list(points) == [name]


def test_plugins_of_one_name_have_folders_of_their_own():
    names = package_names([("scheduler", "mine"), ("attention", "mine"), ("connector", "other")], "p", KIND_NAMES)
    assert [plugin.module for plugin in names.plugins] == ["scheduler_mine", "attention_mine", "other"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scheduler", "auto"], "cannot be called 'auto'"),
        (["scheduler", "my policy"], "cannot be called 'my policy'"),
        (["scheduler", "-x"], "cannot be called '-x'"),
        (["scheduler", "x/y"], "cannot be called 'x/y'"),
        (["scheduler", "../x"], "cannot be called '../x'"),
        (["scheduler", "é"], "cannot be called 'é'"),
        (["scheduler", LONGEST + "x"], "cannot be called"),
        (["scheduler:"], "cannot be called ''"),
        (["policy", "x"], "no plugin kind 'policy'; the kinds are scheduler"),
        (["executor", "x"], "There is no template for a plugin of kind executor"),
        (["scheduler"], "neither KIND NAME nor a list of KIND:NAME"),
        (["scheduler", "x", "y"], "neither KIND NAME nor a list of KIND:NAME"),
        (["scheduler:x", "attention"], "neither KIND NAME nor a list of KIND:NAME"),
        (["scheduler:x", "attention:y"], "name it with --package"),
        (["scheduler:x", "scheduler:x", "--package", "p"], "given twice"),
        (["scheduler:a-b", "scheduler:a_b", "--package", "p"], "differs from another one only in case"),
        (["scheduler", "x", "--package", "a/b"], "A package cannot be called 'a/b'"),
        (["scheduler", "x", "--package", "7up"], "would be imported as '7up'"),
        (["scheduler", "x", "--package", "import"], "would be imported as 'import'"),
        (["scheduler", "x", "--package", "LLMkit"], "would be imported as 'llmkit'"),
    ],
)
def test_what_will_not_do_is_a_usage_error_and_leaves_nothing(llmkit, tmp_path, arguments, message):
    code, _, err = llmkit("plugins", "new", "--dir", str(tmp_path), *arguments[:1], "--", *arguments[1:])
    if "--package" in arguments:
        code, _, err = llmkit("plugins", "new", "--dir", str(tmp_path), *arguments)
    assert code == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_ever_overwritten(llmkit, tmp_path):
    for number, name in enumerate(["llmkit-full", "llmkit-empty", "llmkit-file", "llmkit-link"]):
        target = tmp_path / name
        if number == 0:
            (target / "src").mkdir(parents=True)
        elif number == 1:
            target.mkdir()
        elif number == 2:
            target.write_text("mine")
        else:
            target.symlink_to(tmp_path / "nowhere")
        before = sorted(tmp_path.rglob("*"))
        code, _, err = llmkit("plugins", "new", "model", name.removeprefix("llmkit-"), "--dir", str(tmp_path))
        assert code == 2
        assert "exists already" in err
        assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "llmkit-file").read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    names = package_names([("scheduler", "x")], None, KIND_NAMES)
    with pytest.raises(ConfigError, match="cannot be made"):
        write_package(names, tmp_path / "file" / "deep")

    def fail(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr("pathlib.Path.write_text", fail)
    with pytest.raises(ConfigError, match="the disk is full"):
        write_package(names, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_there_is_a_template_for_every_kind_but_executors():
    assert {kind.name for kind in KINDS} - set(KIND_NAMES) == {"executor"}


def test_pairs_of_arguments():
    assert pairs_of(["scheduler", "a"]) == [("scheduler", "a")]
    assert pairs_of(["scheduler:a"]) == [("scheduler", "a")]
    assert pairs_of(["scheduler:a", "model:B"]) == [("scheduler", "a"), ("model", "B")]
