"""Entry point of the `llmkit` command: finds the subcommand, runs it, turns errors into one paragraph and a code.

Exit codes: 0 done, 1 failed, 2 usage (a bad flag, setting or request), 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

import typer

import llmkit
from llmkit.engine.collection import own_process
from llmkit.errors import ConfigError, InvalidRequestError, LlmkitError
from llmkit_cli.messages import print_error
from llmkit_cli.registry import BUILTIN_COMMANDS, load_command, plugin_commands

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit. `--debug` anywhere before `--` shows the whole traceback of an error."""
    open_missing_streams()
    own_process()
    args, debug = take_debug_flag(list(sys.argv[1:] if arguments is None else arguments))
    try:
        dispatch(args)
    except LlmkitError as error:
        code = EXIT_USAGE if isinstance(error, ConfigError | InvalidRequestError) else EXIT_FAILED
        fail(str(error), code, debug)
    except KeyboardInterrupt:
        fail("Interrupted.", EXIT_INTERRUPTED, debug)
    except BrokenPipeError:
        # The reader of our output has gone: not an error. Keep the interpreter from flushing into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        fail(f"Unexpected error: {reason}. Run again with --debug for the details.", EXIT_FAILED, debug)


def open_missing_streams() -> None:
    """A process may be started with its standard streams closed; Python then has None in their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the process's life


def take_debug_flag(args: list[str]) -> tuple[list[str], bool]:
    """Remove `--debug` from the arguments, up to a `--` that ends the options."""
    end = args.index("--") if "--" in args else len(args)
    kept = [arg for arg in args[:end] if arg != "--debug"]
    return kept + args[end:], len(kept) != end


def dispatch(args: list[str]) -> None:
    """Hand the arguments to the subcommand's own app, or to the root app for help, version and unknown names."""
    if args and not args[0].startswith("-"):
        app = load_command(args[0])
        if app is not None:
            app(args=args[1:], prog_name=f"llmkit {args[0]}")
            return
    root_app()(args=args, prog_name="llmkit")


def root_app() -> typer.Typer:
    """The app that only knows names and summaries of the subcommands."""
    app = typer.Typer(
        name="llmkit",
        help="Build and run LLM inference engines from plugins.",
        epilog="llmkit COMMAND --help explains a command; --debug shows the traceback of an error.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", callback=print_version, is_eager=True, help="Print the version."
        ),
    ) -> None:
        """Build and run LLM inference engines from plugins."""

    for name, builtin in BUILTIN_COMMANDS.items():
        app.command(name, help=builtin.summary)(lambda: None)
    for name, summary in plugin_commands().items():
        app.command(name, help=summary)(lambda: None)
    return app


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"llmkit {llmkit.__version__}")
        raise typer.Exit


def fail(message: str, code: int, debug: bool) -> None:
    """Print one paragraph on stderr and exit; with `debug`, the traceback first."""
    if debug:
        traceback.print_exc()
    print_error(message)
    sys.exit(code)


if __name__ == "__main__":
    main()
