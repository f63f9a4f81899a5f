"""The documentation says what the code says."""

import importlib.util
import inspect
import re
import tomllib
from pathlib import Path

import pytest

from llmkit.hookspecs.kinds import KINDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CODE = ("src", "cli", "plugins", "attention_backends", "connectors", "schedulers", "structured")


@pytest.fixture(scope="module")
def render():
    spec = importlib.util.spec_from_file_location("llmkit_docs_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda page: module.on_page_markdown((DOCS / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_hook_has_a_heading_with_its_exact_signature(kind, render):
    page = re.split(r"^## Hooks?$", render(f"plugins/{kind.name}.md"), flags=re.MULTILINE)[1]
    for hook in (*kind.hooks, *kind.optional_hooks):
        assert re.search(rf"^### `{hook.__name__}`$", page, re.MULTILINE)
        parameters = ", ".join(str(p) for p in inspect.signature(hook).parameters.values())
        rendered = re.search(rf"def {hook.__name__}\((.*?)\)\s*(->|:)", page, re.DOTALL)
        assert rendered is not None
        assert " ".join(rendered[1].split()).rstrip(",") == parameters.replace("'", "")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_has_guidance_before_its_reference(kind, render):
    text = re.split(r"^## ", render(f"plugins/{kind.name}.md"), flags=re.MULTILINE)[0]
    assert len(text.split()) > 40


@pytest.mark.parametrize("page", sorted(p.relative_to(DOCS).as_posix() for p in DOCS.glob("**/*.md")))
def test_no_marker_is_left_over(page, render):
    assert "{{" not in render(page)


def test_the_tutorial_includes_every_file_of_its_package():
    """As snippets in the one spelling that mkdocs knows: a formatter that touches them leaves the page without code."""
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    included = re.findall(r'^--8<-- "(.+)"$', text, re.MULTILINE)
    assert all((ROOT / path).is_file() for path in included)
    package = ROOT / "examples" / "llmkit-shortest-first"
    files = {"pyproject.toml", *(path.relative_to(package).as_posix() for path in package.glob("src/*/*.py"))}
    assert {(ROOT / path).relative_to(package).as_posix() for path in included} == files


def test_the_kinds_table_lists_every_kind(render):
    page = render("plugins/index.md")
    for kind in KINDS:
        assert f"| `{kind.name}` | `{kind.group}` |" in page


def test_the_configuration_reference_lists_every_setting(render):
    from llmkit.config import all_flags

    page = render("configuration.md")
    for flag in all_flags():
        assert flag.key in page


def messages_and_pages() -> list[Path]:
    code = [path for folder in CODE for path in (ROOT / folder).glob("**/*.py")]
    return [*code, *DOCS.glob("**/*.md"), ROOT / "README.md", *(ROOT / "examples").glob("*/README.md")]


def test_commands_that_install_a_library_work():
    """No index has llmkit: pages name extras of a clone; messages the libraries, in the range that the extras have."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    known = {line.partition(";")[0] for lines in extras.values() for line in lines}
    libraries = 0
    for path in messages_and_pages():
        for command in re.findall(r"pip install ((?:'[^'\n]+' ?)+)", path.read_text(encoding="utf-8")):
            for target in re.findall(r"'([^']+)'", command):
                assert not target.startswith("llmkit["), path
                if extra := re.fullmatch(r"\.\[(.+)\]", target):
                    assert extra[1] in extras, (path, target)
                elif re.match(r"[a-z0-9_-]+>=", target):
                    assert target in known, (path, target)
                    libraries += 1
    assert libraries >= 6


def test_a_grammar_engine_is_named_before_the_first_example_needs_one():
    text = (DOCS / "structured-output.md").read_text(encoding="utf-8")
    assert text.index("pip install") < text.index("```python")


def test_the_tutorial_installs_before_it_tests():
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    (extra,) = re.findall(r"pip install '\./examples/llmkit-shortest-first\[(\w+)\]'", text)
    assert text.index("pip install") < text.index("    pytest ")
    project = tomllib.loads((ROOT / "examples" / "llmkit-shortest-first" / "pyproject.toml").read_text("utf-8"))
    assert any(line.startswith("pytest") for line in project["project"]["optional-dependencies"][extra])


def test_links_of_the_readme_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (ROOT / target).exists(), target


def test_structure_names_every_package_of_the_core():
    text = (DOCS / "structure.md").read_text(encoding="utf-8")
    packages = {p.parent.name for p in (ROOT / "src" / "llmkit").glob("*/__init__.py")}
    missing = [package for package in packages if f"{package}/" not in text]
    assert missing == []


def test_structure_names_every_plugin_package():
    text = (DOCS / "structure.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [path for path in packages if path != "src/llmkit" and f"| `{path}` |" not in text] == []


def test_structure_names_only_files_that_exist():
    text = (DOCS / "structure.md").read_text(encoding="utf-8")
    for name in re.findall(
        r"`((?:src|schedulers|attention_backends|connectors|structured|plugins|cli)/[\w/.]+)`", text
    ):
        assert (ROOT / name).exists(), name
