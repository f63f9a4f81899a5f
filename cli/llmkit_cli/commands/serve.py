"""`llmkit serve`: the model over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from llmkit_cli.engine_options import ALL_OPTIONS, loaded_config, loading_bar, print_dry_run
from llmkit_cli.signature import LongHelp, with_options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=LongHelp)
@with_options(ALL_OPTIONS)
def serve(
    model_name: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Folder, GGUF file, or name in the llmkit cache; the same as --model."),
    ] = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Serve a model over HTTP, with the API of OpenAI and more (docs/server.md).

    SIGTERM or Ctrl-C lets requests that are under way finish; a second one ends them.
    """
    more = {} if model_name is None else {"model.model": model_name}
    if engine["dry_run"]:
        print_dry_run(engine, online=True, **more)
        return
    config = loaded_config(engine, **more).config
    from llmkit_server.run import serve as run_server

    with loading_bar() as progress:
        code = run_server(config, progress, lambda line: typer.echo(line, err=True))
    raise typer.Exit(code)
