"""A server as commands for the terminal use it: one answer at a time, printed as it comes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from llmkit_cli.remote.server import RemoteServer


class TerminalServer:
    """A server and the event loop it is used in. model: the name that requests have."""

    def __init__(self, runner: asyncio.Runner, server: RemoteServer, model: str, fields: Mapping[str, Any]) -> None:
        self._runner = runner
        self._server = server
        self._fields = {"model": model, "stream": True, **fields}

    def complete(self, prompt: str) -> str:
        """Print the continuation of `prompt`, and return it; Ctrl-C ends it. Raises RemoteError."""
        return self._print("/v1/completions", {"prompt": prompt})

    def chat(self, messages: list[dict[str, str]]) -> str:
        """Print the answer to a conversation, and return it; Ctrl-C ends it. Reasoning is shown to a person only, and
        is no part of what is returned. Raises RemoteError."""
        return self._print("/v1/chat/completions", {"messages": messages})

    def _print(self, path: str, body: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        try:
            self._runner.run(self._stream(path, {**self._fields, **body}, pieces))
        except KeyboardInterrupt:
            pass
        finally:
            sys.stdout.write("\n")
        return "".join(pieces)

    async def _stream(self, path: str, body: Mapping[str, Any], pieces: list[str]) -> None:
        shows_reasoning, reasons = sys.stdout.isatty(), False
        async for chunk in self._server.stream(path, body):
            for choice in chunk.choices[:1]:
                if choice.reasoning and shows_reasoning:
                    reasons = True
                    sys.stdout.write(typer.style(choice.reasoning, dim=True))
                if choice.content:
                    if reasons:
                        sys.stdout.write("\n\n")
                        reasons = False
                    pieces.append(choice.content)
                    sys.stdout.write(choice.content)
            sys.stdout.flush()


@contextmanager
def open_server(remote: dict[str, Any], model: str | None, fields: Mapping[str, Any]) -> Iterator[TerminalServer]:
    """The server of the flags. fields: what every request has. Raises RemoteError, InvalidRequestError."""
    server = RemoteServer(remote["url"], remote["api_key"])
    with asyncio.Runner() as runner:
        runner.run(server.__aenter__())
        try:
            name = runner.run(server.served_model(model))
            yield TerminalServer(runner, server, name, fields)
        finally:
            runner.run(server.__aexit__(None, None, None))
