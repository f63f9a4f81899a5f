"""`llmkit complete`: continuations of texts, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmkit.errors import InvalidRequestError
from llmkit_cli.engine_options import ENGINE_OPTIONS, open_llm, print_dry_run
from llmkit_cli.remote.errors import RemoteError
from llmkit_cli.remote.options import REMOTE_OPTIONS, remote_model
from llmkit_cli.sampling_options import DEFAULT_MAX_TOKENS, SAMPLING_OPTIONS, given_sampling, sampling_params
from llmkit_cli.signature import LongHelp, with_options

if TYPE_CHECKING:
    from llmkit import LLM, SamplingParams

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

HELP = "Each line is a text to go on with; Ctrl-D leaves, Ctrl-C stops a continuation."

Completer = Callable[[str], object]
"""Prints the continuation of a text as it comes."""


@app.command(cls=LongHelp)
@with_options(REMOTE_OPTIONS, ENGINE_OPTIONS, SAMPLING_OPTIONS)
def complete(
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Texts to go on with; none: lines as they come.")
    ] = None,
    *,
    remote: dict[str, Any],
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Go on with texts, with a model in this process or, with --url, on a server. Without PROMPT, each line of the
    input is one."""
    if remote["url"] is not None:
        from llmkit_cli.remote.terminal import open_server

        fields = {"max_tokens": DEFAULT_MAX_TOKENS, **given_sampling(sampling)}
        with open_server(remote, remote_model(engine), fields) as server:
            go_on(server.complete, prompts)
        return
    if engine["dry_run"]:
        print_dry_run(engine)
        return
    with open_llm(engine) as llm:
        params = sampling_params(llm, sampling)
        go_on(lambda text: stream_text(llm, text, params), prompts)


def go_on(completer: Completer, prompts: list[str] | None) -> None:
    """Complete `prompts`, where the first error is the end; or the lines of the input, where an error ends only its
    line."""
    for prompt in prompts or ():
        completer(prompt)
    if prompts:
        return
    if sys.stdin.isatty():
        typer.secho(HELP, dim=True, err=True)
    for line in lines_of_input():
        try:
            completer(line)
        except (InvalidRequestError, RemoteError) as error:
            typer.secho(str(error), fg=typer.colors.RED, err=True)


def lines_of_input() -> Iterator[str]:
    """Lines that are not empty, until the end of input."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def stream_text(llm: LLM, text: str, params: SamplingParams) -> None:
    """Print the continuation as it comes; Ctrl-C ends it. Raises RequestFailedError."""
    from llmkit.errors import RequestFailedError

    stream = llm.stream(text, params)
    error: str | None = None
    try:
        for output in stream:
            sys.stdout.write(output.outputs[0].text)
            sys.stdout.flush()
            if output.outputs[0].finish_reason == "error":
                error = output.error or "the engine failed."
    except KeyboardInterrupt:
        stream.close()
    sys.stdout.write("\n")
    if error is not None:
        raise RequestFailedError(error)
