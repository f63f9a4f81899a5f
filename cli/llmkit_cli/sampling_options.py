"""Sampling flags shared by `generate` and `chat`, and how they become SamplingParams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmkit_cli.signature import OptionGroup

if TYPE_CHECKING:
    from llmkit import LLM, SamplingParams

SAMPLING = "Sampling"

SAMPLING_OPTIONS = OptionGroup(
    "sampling",
    {
        "max_tokens": (
            Annotated[
                int | None,
                typer.Option(min=0, help="Most tokens to generate. (default: 256)", rich_help_panel=SAMPLING),
            ],
            None,
        ),
        "temperature": (
            Annotated[
                float | None,
                typer.Option(help="0 is greedy. (default: the model's, else 1)", rich_help_panel=SAMPLING),
            ],
            None,
        ),
        "top_p": (Annotated[float | None, typer.Option(help="Nucleus sampling.", rich_help_panel=SAMPLING)], None),
        "top_k": (Annotated[int | None, typer.Option(help="0 or -1: off.", rich_help_panel=SAMPLING)], None),
        "min_p": (Annotated[float | None, typer.Option(help="Relative floor.", rich_help_panel=SAMPLING)], None),
        "repetition_penalty": (
            Annotated[float | None, typer.Option(help="Over prompt and output.", rich_help_panel=SAMPLING)],
            None,
        ),
        "presence_penalty": (
            Annotated[float | None, typer.Option(help="Over the output.", rich_help_panel=SAMPLING)],
            None,
        ),
        "frequency_penalty": (
            Annotated[float | None, typer.Option(help="Over the output.", rich_help_panel=SAMPLING)],
            None,
        ),
        "sampling_seed": (
            Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.", rich_help_panel=SAMPLING)],
            None,
        ),
        "stop": (
            Annotated[
                list[str] | None, typer.Option(help="Stop before this text; may be repeated.", rich_help_panel=SAMPLING)
            ],
            None,
        ),
        "ignore_eos": (
            Annotated[bool, typer.Option("--ignore-eos", help="Go on to max-tokens.", rich_help_panel=SAMPLING)],
            False,
        ),
    },
)

DEFAULT_MAX_TOKENS = 256


def given_sampling(values: dict[str, Any]) -> dict[str, Any]:
    """The flags that were given, by the names of SamplingParams and of requests over HTTP."""
    # `0 in (None, False)` is true: zero is a value here, so the absent ones are told apart by identity.
    given = {name: value for name, value in values.items() if value is not None and value is not False and value != []}
    if "sampling_seed" in given:
        given["seed"] = given.pop("sampling_seed")
    return given


def check_sampling(values: dict[str, Any], **extra: Any) -> None:
    """Judge the flags before a model is loaded for them. Raises InvalidRequestError for bad values."""
    from llmkit import SamplingParams

    SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **given_sampling(values), **extra})


def sampling_params(llm: LLM, values: dict[str, Any], **extra: Any) -> SamplingParams:
    """The model's own defaults with the flags that were given on top. Raises InvalidRequestError for bad values."""
    import msgspec

    given = given_sampling(values)
    defaults = msgspec.structs.asdict(llm.get_default_sampling_params())
    from llmkit import SamplingParams

    return SamplingParams(**{**defaults, "max_tokens": DEFAULT_MAX_TOKENS, **given, **extra})
