"""`llmkit chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmkit.errors import InvalidRequestError
from llmkit_cli.engine_options import ENGINE_OPTIONS, open_llm, print_dry_run
from llmkit_cli.remote.errors import RemoteError
from llmkit_cli.remote.options import REMOTE_OPTIONS, remote_model
from llmkit_cli.sampling_options import (
    DEFAULT_MAX_TOKENS,
    SAMPLING_OPTIONS,
    check_sampling,
    given_sampling,
    sampling_params,
)
from llmkit_cli.signature import LongHelp, with_options

if TYPE_CHECKING:
    from llmkit import LLM, SamplingParams

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."

Answerer = Callable[[list[dict[str, str]]], str]
"""Prints the answer to a conversation as it comes, and returns it."""


@app.command(cls=LongHelp)
@with_options(REMOTE_OPTIONS, ENGINE_OPTIONS, SAMPLING_OPTIONS)
def chat(
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    *,
    remote: dict[str, Any],
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk to a model, in this process or, with --url, on a server. /reset forgets the conversation, /exit or Ctrl-D
    leaves, Ctrl-C stops an answer."""
    if remote["url"] is not None:
        from llmkit_cli.remote.terminal import open_server

        fields = {"max_tokens": DEFAULT_MAX_TOKENS, **given_sampling(sampling)}
        with open_server(remote, remote_model(engine), fields) as server:
            converse(server.chat, system)
        return
    if engine["dry_run"]:
        print_dry_run(engine)
        return
    check_sampling(sampling)
    with open_llm(engine) as llm:
        params = sampling_params(llm, sampling)
        converse(lambda messages: stream_answer(llm, messages, params), system)


def converse(answer: Answerer, system: str | None) -> None:
    """Read turns until the end of input. A turn that is refused is taken back, the conversation goes on."""
    if sys.stdin.isatty():
        typer.secho(HELP, dim=True, err=True)
    head = [{"role": "system", "content": system}] if system is not None else []
    messages = list(head)
    while (line := read_turn()) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            messages = list(head)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            said = answer(messages)
        except (InvalidRequestError, RemoteError) as error:
            messages.pop()
            typer.secho(str(error), fg=typer.colors.RED, err=True)
            continue
        messages.append({"role": "assistant", "content": said})


def read_turn() -> str | None:
    """A line of the user's, None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except EOFError:
        return None


def stream_answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the answer as it comes; Ctrl-C ends it and keeps what has been said."""
    pieces: list[str] = []
    stream = llm.stream(messages, params)
    try:
        for output in stream:
            pieces.append(output.outputs[0].text)
            sys.stdout.write(pieces[-1])
            sys.stdout.flush()
    except KeyboardInterrupt:
        stream.close()
    sys.stdout.write("\n")
    return "".join(pieces)
