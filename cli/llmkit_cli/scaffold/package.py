"""Writes the files of a new package from the templates beside this module."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmkit.errors import ConfigError
from llmkit_cli.scaffold.naming import PackageNames, PluginNames

if TYPE_CHECKING:
    import jinja2

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".jinja"

# Template of the package → where it goes; `{package}` is the folder that is imported.
PACKAGE_FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "ci.yml": ".github/workflows/tests.yml",
    "__init__.py": "src/{package}/__init__.py",
}


def kinds_with_template() -> tuple[str, ...]:
    """The kinds of plugins that can be written, in alphabetical order."""
    return tuple(sorted(path.name for path in TEMPLATES.iterdir() if path.is_dir() and path.name != "package"))


def write_package(names: PackageNames, parent: Path) -> list[Path]:
    """Write the package into `parent`/distribution, which must not exist; the files, relative to it.

    Raises ConfigError if it exists or cannot be written; then nothing is left behind.
    """
    files = dict(_rendered(names))
    folder = parent / names.distribution
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists already.", hint="Name another folder with --dir.") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error}.") from error
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"{folder} cannot be written: {error}.") from error
        raise
    return [Path(path) for path in files]


def _rendered(names: PackageNames) -> Iterator[tuple[str, str]]:
    """(path, text) of each file."""
    values = _package_values(names)
    for template, path in PACKAGE_FILES.items():
        yield path.format(package=names.package), _render(f"package/{template}", values)
    yield f"src/{names.package}/py.typed", ""
    for plugin in names.plugins:
        for source in sorted((TEMPLATES / plugin.kind.name).glob(f"*{SUFFIX}")):
            file = source.name.removesuffix(SUFFIX)
            place = (
                f"tests/test_{plugin.module}.py" if file == "test.py" else f"src/{names.package}/{plugin.module}/{file}"
            )
            yield place, _render(f"{plugin.kind.name}/{file}", values | {"plugin": plugin})


def _package_values(names: PackageNames) -> dict[str, Any]:
    from llmkit import __version__

    major, minor = __version__.split(".")[:2]
    groups: dict[str, list[PluginNames]] = {}
    for plugin in names.plugins:
        groups.setdefault(plugin.kind.group, []).append(plugin)
    kinds = dict.fromkeys(plugin.kind.name for plugin in names.plugins)
    return {
        "distribution": names.distribution,
        "package": names.package,
        "plugins": names.plugins,
        "groups": sorted(groups.items()),
        "description": f"Plugins for llmkit: {', '.join(kinds)}",
        # A minor version of llmkit may change hooks.
        "llmkit_versions": f">={major}.{minor},<{major}.{int(minor) + 1}",
    }


def _render(template: str, values: dict[str, Any]) -> str:
    return _templates().get_template(f"{template}{SUFFIX}").render(values)


@cache
def _templates() -> jinja2.Environment:
    """Marks that neither Python nor TOML nor GitHub's workflows have a use for."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="«",
        variable_end_string="»",
        autoescape=False,
    )
