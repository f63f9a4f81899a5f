"""`llmkit generate`: text for one or more prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmkit.config.values import reason
from llmkit.errors import InvalidRequestError, shown
from llmkit_cli.engine_options import ENGINE_OPTIONS, open_llm, print_dry_run
from llmkit_cli.sampling_options import SAMPLING_OPTIONS, check_sampling, sampling_params
from llmkit_cli.signature import LongHelp, with_options
from llmkit_cli.structured_options import STRUCTURED_OPTIONS, structured_outputs

if TYPE_CHECKING:
    from llmkit import LLM, RequestOptions, RequestOutput, SamplingParams

PROMPT_FIELDS = ("prompt", "user", "priority")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=LongHelp)
@with_options(ENGINE_OPTIONS, SAMPLING_OPTIONS, STRUCTURED_OPTIONS)
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help='Prompts; "-" reads one from standard input.')] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(
            help="A file of prompts: one a line, or JSON lines with a key `prompt`, and maybe `user` and `priority` "
            "for schedulers that go by them."
        ),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat each prompt as a user's message.")] = False,
    system: Annotated[str | None, typer.Option(help="System message; implies --chat.")] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Answers per prompt.")] = 1,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream",
            help="Print the text as it comes. Default: in a terminal, for one prompt and one answer.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
    constraint: dict[str, Any],
) -> None:
    """Generate text for one or more prompts.

    For example: llmkit generate --model smollm2-135m-instruct --chat "Name three rivers."
    """
    if engine["dry_run"]:
        print_dry_run(engine)
        return
    given = collect_prompts(prompts or [], prompts_file)
    texts, options = [text for text, _ in given], [option for _, option in given]
    single = len(texts) == 1 and n == 1 and not as_json
    if stream and not single:
        raise InvalidRequestError("--stream takes one prompt, --n 1 and no --json.")
    if stream is None:
        stream = single and sys.stdout.isatty()
    constraints = structured_outputs(constraint)
    check_sampling(sampling, n=n, structured_outputs=constraints)
    with open_llm(engine) as llm:
        params = sampling_params(llm, sampling, n=n, structured_outputs=constraints)
        if stream:
            stream_one(llm, texts[0], params, options[0], chat=chat or system is not None, system=system)
            return
        outputs = generate_all(llm, texts, params, options, chat=chat or system is not None, system=system)
        failed = [output for output in outputs if any(c.finish_reason == "error" for c in output.outputs)]
        for text, output in zip(texts, outputs, strict=True):
            print_output(text, output, as_json=as_json, headline=len(texts) > 1 or n > 1)
    for output in failed:
        typer.echo(f"error: {output.error}", err=True)
    if failed:
        raise typer.Exit(1)


def collect_prompts(arguments: list[str], file: Path | None) -> list[tuple[str, RequestOptions]]:
    """Prompts with their options from the arguments, standard input ("-", or piped with no arguments) and a file, in
    that order."""
    from llmkit import RequestOptions

    plain = RequestOptions()
    prompts = [(sys.stdin.read() if argument == "-" else argument, plain) for argument in arguments]
    if file is not None:
        prompts += read_prompts(file)
    if not prompts and file is None and not sys.stdin.isatty() and (piped := sys.stdin.read()):
        prompts = [(piped, plain)]
    if not prompts:
        raise InvalidRequestError(
            'No prompt was given: pass one as an argument, "-" for standard input, or --prompts-file.'
        )
    return prompts


def read_prompts(file: Path) -> list[tuple[str, RequestOptions]]:
    """One prompt a line; a line that is a JSON object gives its `prompt`, `user` and `priority`."""
    from llmkit import RequestOptions

    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The prompts file {file} cannot be read: {error}.") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if file.suffix in (".jsonl", ".json"):
            prompts.append(prompt_of_json(line, f"{file}:{number}"))
        else:
            prompts.append((line, RequestOptions()))
    return prompts


def prompt_of_json(line: str, where: str) -> tuple[str, RequestOptions]:
    from llmkit import RequestOptions

    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:  # also for nesting without end and integers of thousands of digits
        raise InvalidRequestError(f"{where} is not JSON: {reason(error)}.") from error
    fields = value if isinstance(value, dict) else {"prompt": value}
    prompt = fields.get("prompt")
    if not isinstance(prompt, str):
        raise InvalidRequestError(f'{where} must be a string or an object with a string under "prompt".')
    unknown = sorted(fields.keys() - PROMPT_FIELDS)
    if unknown:
        valid = ", ".join(PROMPT_FIELDS)
        raise InvalidRequestError(f"{where} has the unknown key {shown(unknown[0])}.", hint=f"Valid: {valid}.")
    return prompt, RequestOptions(user=fields.get("user"), priority=fields.get("priority", 0))


def as_messages(text: str, system: str | None) -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system is not None else []
    return [*head, {"role": "user", "content": text}]


def stream_one(
    llm: LLM, text: str, params: SamplingParams, options: RequestOptions, *, chat: bool, system: str | None
) -> None:
    prompt: Any = as_messages(text, system) if chat else text
    reason, error = None, None
    for output in llm.stream(prompt, params, options=options):
        completion = output.outputs[0]
        sys.stdout.write(completion.text)
        sys.stdout.flush()
        reason, error = completion.finish_reason, output.error
    sys.stdout.write("\n")
    if reason == "error":
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1)


def generate_all(
    llm: LLM,
    texts: list[str],
    params: SamplingParams,
    options: list[RequestOptions],
    *,
    chat: bool,
    system: str | None,
) -> list[RequestOutput]:
    show_progress = sys.stderr.isatty() and len(texts) > 1
    if chat:
        conversations = [as_messages(text, system) for text in texts]
        return llm.chat(conversations, params, options=options, use_tqdm=show_progress)
    return llm.generate(texts, params, options=options, use_tqdm=show_progress)


def print_output(text: str, output: RequestOutput, *, as_json: bool, headline: bool) -> None:
    if as_json:
        choices = [
            {"index": c.index, "text": c.text, "token_ids": list(c.token_ids), "finish_reason": c.finish_reason}
            for c in output.outputs
        ]
        typer.echo(json.dumps({"prompt": text, "outputs": choices}, ensure_ascii=False))
        return
    if headline:
        typer.secho(f"> {text}", dim=True)
    for completion in output.outputs:
        typer.echo(completion.text)
