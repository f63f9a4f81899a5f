"""`llmkit complete`: continuations of texts, in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmkit.errors import InvalidRequestError, RequestFailedError
from llmkit_cli.engine_options import ENGINE_OPTIONS, open_llm, print_dry_run
from llmkit_cli.input_lines import check_text, end, next_line
from llmkit_cli.messages import print_error
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
            all_completed = go_on(server.complete, prompts)
        end(all_completed)
        return
    if engine["dry_run"]:
        print_dry_run(engine)
        return
    with open_llm(engine) as llm:
        params = sampling_params(llm, sampling)
        all_completed = go_on(lambda text: stream_text(llm, text, params), prompts)
    end(all_completed)


def go_on(completer: Completer, prompts: list[str] | None) -> bool:
    """Complete `prompts`, where the first error is the end; or the lines of the input, where an error ends only its
    line. Returns whether there was none."""
    for prompt in prompts or ():
        completer(prompt)
    if prompts:
        return True
    all_completed = True
    if sys.stdin.isatty():
        typer.secho(HELP, dim=True, err=True)
    while (line := next_line()) is not None:
        if not line.strip():
            continue
        try:
            check_text(line)
            completer(line)
        except (InvalidRequestError, RequestFailedError, RemoteError) as error:
            all_completed = False
            print_error(str(error))
    return all_completed


def stream_text(llm: LLM, text: str, params: SamplingParams) -> None:
    """Print the continuation as it comes; Ctrl-C ends it. Raises RequestFailedError."""
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
