"""What `make` sets up."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_source_root_is_compiled_after_the_install():
    """An editable install compiles nothing: where Python may not write bytecode, each start compiled all modules."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    sources = re.search(r"^SOURCES := (.*)$", makefile, re.MULTILINE)
    assert sources is not None
    assert sources[1].split() == project["tool"]["hatch"]["build"]["dev-mode-dirs"]
    recipes = makefile.split("\n\n")
    installs = [recipe for recipe in recipes if "pip install" in recipe]
    assert len(installs) == 2
    assert all("$(COMPILE)" in recipe for recipe in installs)
