"""`llmkit chat`: a conversation in the terminal."""

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
            answered = converse(server.chat, system)
        end(answered)
        return
    if engine["dry_run"]:
        print_dry_run(engine)
        return
    check_sampling(sampling)
    with open_llm(engine) as llm:
        params = sampling_params(llm, sampling)
        answered = converse(lambda messages: stream_answer(llm, messages, params), system)
    end(answered)


def converse(answer: Answerer, system: str | None) -> bool:
    """Read turns until the end of input; whether all were answered. A turn that is refused or fails is taken back,
    the conversation goes on."""
    all_answered = True
    if sys.stdin.isatty():
        typer.secho(HELP, dim=True, err=True)
    head = [{"role": "system", "content": system}] if system is not None else []
    messages = list(head)
    while (line := next_line()) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(head)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            check_text(line)
            said = answer(messages)
        except (InvalidRequestError, RequestFailedError, RemoteError) as error:
            messages.pop()
            all_answered = False
            print_error(str(error))
            continue
        messages.append({"role": "assistant", "content": said})
    return all_answered


def stream_answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Print the answer as it comes; Ctrl-C ends it and keeps what has been said. Raises RequestFailedError."""
    pieces: list[str] = []
    error: str | None = None
    stream = llm.stream(messages, params)
    try:
        for output in stream:
            pieces.append(output.outputs[0].text)
            sys.stdout.write(pieces[-1])
            sys.stdout.flush()
            if output.outputs[0].finish_reason == "error":
                error = output.error or "the engine failed."
    except KeyboardInterrupt:
        stream.close()
    sys.stdout.write("\n")
    if error is not None:
        raise RequestFailedError(error)
    return "".join(pieces)
