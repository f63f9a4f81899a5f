"""Names of a new package and its plugins: checked, and derived from one another."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmkit.errors import ConfigError
from llmkit.hookspecs.kinds import PluginKind, kind_named

# As the name of a distribution (PEP 508): one that is also a good value of a flag and a good file name.
NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
MAX_LENGTH = 40
RESERVED = ("auto", "none", "null")


@dataclass(frozen=True)
class PluginNames:
    """One plugin. module: its folder in the package."""

    kind: PluginKind
    name: str
    module: str

    @property
    def spec(self) -> str:
        """As it is inspected and tried: KIND:NAME."""
        return f"{self.kind.name}:{self.name}"

    @property
    def key(self) -> str:
        """The name as a TOML key."""
        return self.name if "." not in self.name else f'"{self.name}"'

    @property
    def chosen_with(self) -> str:
        """How a user chooses it, for a table in Markdown."""
        if self.kind.flag:
            return f"`{self.kind.flag} {self.name}`"
        ways = {
            "model": f'`"architectures": ["{self.name}"]` in config.json',
            "command": f"`llmkit {self.name}`",
            "extension": f'`extensions = ["{self.name}"]`',
        }
        return ways[self.kind.name]


@dataclass(frozen=True)
class PackageNames:
    """A distribution, the package that it installs, and its plugins."""

    distribution: str
    package: str
    plugins: tuple[PluginNames, ...]


def package_names(pairs: Sequence[tuple[str, str]], distribution: str | None, kinds: Sequence[str]) -> PackageNames:
    """Names for a package with these (kind, name) plugins. distribution: its name; by default `llmkit-NAME` of the only
    plugin. kinds: those for which there is something to write.

    Raises ConfigError for a name that will not do, a kind that does not exist or has no template, a plugin given twice.
    """
    for kind, name in pairs:
        _check_kind(kind, kinds)
        _check_name(name, f"{kind} plugin")
    if len(set(pairs)) != len(pairs):
        raise ConfigError("A plugin is given twice.")
    if distribution is None:
        if len(pairs) > 1:
            raise ConfigError("Several plugins make one package: name it with --package.")
        distribution = f"llmkit-{pairs[0][1].lower().replace('_', '-')}"
    _check_name(distribution, "package")
    package = _snake(distribution)
    if not package.isidentifier() or keyword.iskeyword(package) or package == "llmkit":
        raise ConfigError(
            f"The package {distribution!r} would be imported as {package!r}, which will not do.",
            hint="Choose another name with --package.",
        )
    return PackageNames(distribution, package, tuple(_plugin(pair, pairs) for pair in pairs))


def _plugin(pair: tuple[str, str], pairs: Sequence[tuple[str, str]]) -> PluginNames:
    kind, name = pair
    module = _snake(name)
    same = [other for _, other in pairs if _snake(other) == module]
    if len(same) > 1 or not module.isidentifier() or keyword.iskeyword(module):
        module = f"{kind}_{module}"
    if len({_snake(f"{k}_{n}") for k, n in pairs}) != len(pairs):
        raise ConfigError(f"The name {name!r} differs from another one only in case or punctuation.")
    return PluginNames(kind_named(kind), name, module)


def _snake(name: str) -> str:
    return re.sub(r"[._-]+", "_", name).lower()


def _check_kind(kind: str, kinds: Sequence[str]) -> None:
    try:
        kind_named(kind)
    except KeyError as error:
        raise ConfigError(f"{error.args[0]}.") from error
    if kind not in kinds:
        raise ConfigError(f"There is no template for a plugin of kind {kind}.", hint=f"There is: {', '.join(kinds)}.")


def _check_name(name: str, what: str) -> None:
    if not NAME.fullmatch(name) or len(name) > MAX_LENGTH or name.lower() in RESERVED:
        raise ConfigError(
            f"A {what} cannot be called {name!r}.",
            hint=f"A name has letters, digits and -._ inside, at most {MAX_LENGTH} characters, and is none of "
            f"{', '.join(RESERVED)}.",
        )
