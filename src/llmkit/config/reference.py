"""The configuration reference in Markdown, written from the models: `python -m llmkit.config.reference`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from llmkit.config.engine_config import EngineConfig
from llmkit.config.flags import Flag, all_flags, combined_flags, section_types

_HEAD = """Flags win over environment variables, these over a file (`--config`, TOML or YAML), a file over defaults.

- Dashes and underscores are the same in keys. In a file, settings stand in their section or, under the name of
  their flag, at the top level: `max-num-seqs: 64` is `scheduler: {max_num_seqs: 64}`.
- `LLMKIT_SECTION__FIELD` is the full form of an environment variable, `LLMKIT_FLAG` the short one; an empty variable
  is not set. Lists are separated by commas or written as JSON, tables as JSON.
- `--set KEY=VALUE` sets any key. Options of plugins are `--set KIND.NAME.OPTION=VALUE` on the command line,
  `[plugins.KIND.NAME]` in a file and `LLMKIT_PLUGINS__KIND__NAME__OPTION` in the environment;
  `llmkit plugins inspect KIND:NAME` lists them.
- A key that does not exist, a key given twice in one source, and a value out of range are errors.
"""


def render_reference() -> str:
    """The reference, to stand under a second-level heading: a table of settings for each section."""
    return "\n".join([_HEAD, *_sections()]).rstrip() + "\n"


def _sections() -> Iterator[str]:
    by_section: dict[str, list[Flag]] = {}
    for flag in all_flags():
        by_section.setdefault(flag.key.rpartition(".")[0], []).append(flag)
    for name, section in section_types().items():
        yield f"### {name}\n\n{section.__doc__ or ''}\n"
        yield _table(by_section[name])
    yield f"### Top level\n\n{(EngineConfig.__doc__ or '').splitlines()[0]}\n"
    yield _table(by_section[""])
    yield "### Several at once\n\nFlags that set several of the above. Each takes a JSON object.\n"
    yield _table(list(combined_flags()))


def _table(flags: list[Flag]) -> str:
    rows = [
        "| key | flag | environment | value | default | description |",
        "|---|---|---|---|---|---|",
        *("| " + " | ".join(_cells(flag)) + " |" for flag in flags),
    ]
    return "\n".join(rows) + "\n"


def _cells(flag: Flag) -> Iterator[str]:
    names = [name for name in (flag.name, flag.negative) if name]
    yield f"`{flag.key}`"
    yield " ".join(f"`{name}`" for name in names) or "`--set`"
    yield " ".join(f"`{name}`" for name in (flag.env, flag.flat_env) if name)
    yield flag.allowed
    yield "–" if flag.default is None else f"`{_shown(flag.default)}`"
    yield flag.description.replace("|", "\\|")


def _shown(value: object) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


if __name__ == "__main__":
    print(render_reference(), end="")
