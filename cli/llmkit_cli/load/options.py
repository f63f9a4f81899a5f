"""The flags of `llmkit bench serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from llmkit_cli.remote.options import ApiKey
from llmkit_cli.signature import OptionGroup


def _option(kind: Any, default: Any, text: str, *names: str, panel: str | None = None, **more: Any) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(*names, help=text, rich_help_panel=panel, **more)], default


TARGET_OPTIONS = OptionGroup(
    "target",
    {
        "url": _option(str, "http://127.0.0.1:8000", "The server.", "--url", "--base-url"),
        "model": _option(str | None, None, "Name of the model; default: the first it serves."),
        "api_key": (ApiKey, None),
        "endpoint": _option(Literal["completions", "chat"], "completions", "What to call."),
    },
)

_DATA = "Dataset"

DATA_OPTIONS = OptionGroup(
    "data",
    {
        "dataset": _option(str, "random", "random, a workload of `llmkit bench`, or a .jsonl file.", panel=_DATA),
        "num_prompts": _option(
            int | None, None, "Requests to send; default: the whole dataset, 100 random ones.", panel=_DATA, min=1
        ),
        "input_len": _option(int, 256, "random: tokens in.", panel=_DATA, min=1),
        "output_len": _option(int, 128, "random: tokens out.", panel=_DATA, min=1),
        "range_ratio": _option(float, 0.0, "random: lengths vary by this part.", panel=_DATA, min=0, max=1),
        "prefix_len": _option(int, 0, "random: tokens before that all share.", panel=_DATA, min=0),
        "vocab_size": _option(int, 32_000, "Token ids of prompts are below.", panel=_DATA, min=11),
        "ignore_eos": _option(
            bool | None,
            None,
            "Ask for answers of full length; default: yes, but not for a .jsonl file.",
            "--ignore-eos/--no-ignore-eos",
            panel=_DATA,
            show_default=False,
        ),
        "temperature": _option(float, 0.0, "0 is greedy.", panel=_DATA, min=0),
        "extra_body": _option(str | None, None, "More fields for every request.", panel=_DATA, metavar="JSON"),
    },
)

_LOAD = "Load"

LOAD_OPTIONS = OptionGroup(
    "load",
    {
        "request_rate": _option(str, "inf", "Requests a second; inf: all at once.", panel=_LOAD, metavar="N|inf"),
        "burstiness": _option(
            float, 1.0, "1: Poisson arrivals; less: in bursts; more: more evenly.", panel=_LOAD, min=0.001
        ),
        "max_concurrency": _option(int | None, None, "Most requests at once; others wait unsent.", panel=_LOAD, min=1),
        "sweep": _option(str | None, None, "A run for each rate, such as 1,2,4,inf.", panel=_LOAD, metavar="RATES"),
        "num_warmups": _option(int, 1, "Requests before, one after the other, not counted.", panel=_LOAD, min=0),
        "timeout": _option(float, 600.0, "Seconds until a request has failed.", panel=_LOAD, min=0.001),
        "seed": _option(int, 0, "Of prompts and arrivals.", panel=_LOAD),
    },
)

_RESULT = "Result"

RESULT_OPTIONS = OptionGroup(
    "result",
    {
        "goodput": _option(
            list[str] | None,
            None,
            "Goals in ms for ttft, tpot, e2el, such as --goodput ttft:500 tpot:50: count the requests that meet them "
            "all.",
            panel=_RESULT,
            metavar="NAME:MS",
        ),
        "percentiles": _option(str, "99", "Of every time, such as 50,90; 99 always.", panel=_RESULT),
        "output": _option(Path | None, None, "Write the result as JSON to this file.", panel=_RESULT),
        "with_details": _option(bool, False, "With the numbers of every request.", "--details", panel=_RESULT),
        "plot": _option(
            list[Path] | None,
            None,
            "Write throughput against latency of a sweep to this .png or .html; may be repeated.",
            panel=_RESULT,
        ),
        "as_json": _option(bool, False, "Print JSON.", "--json", panel=_RESULT),
    },
)
