"""Grammars loaded in another process than the one that has compiled them, as in an engine: `python -m
llmkit.testing.conformance.elsewhere JOB RESULT`, both files of pickle."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from llmkit.frontend.token_vocabulary import TokenVocabulary
    from llmkit.hookspecs.structured import GrammarCompiler, GrammarRequest
    from llmkit.testing.conformance.target import Conformance

TIMEOUT_S = 100.0


def masks_elsewhere(
    target: Conformance, vocabulary: TokenVocabulary, compiled: Sequence[tuple[GrammarRequest, bytes]]
) -> list[frozenset[int]]:
    """The tokens with which a text of each grammar may begin, in a process that has compiled none of them.

    Raises AssertionError if the engine on trial fails there, or takes longer than TIMEOUT_S."""
    job = (target.kind, target.choice, dict(target.given), target.device, vocabulary, list(compiled))
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file = Path(folder, "job"), Path(folder, "result")
        job_file.write_bytes(pickle.dumps(job))
        command = [sys.executable, "-m", __name__, str(job_file), str(result_file)]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            done = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            raise AssertionError(f"loading in another process did not end within {TIMEOUT_S:g} s") from None
        told = f"what was compiled cannot be loaded in another process: {done.stderr.strip()[-2000:]}"
        assert done.returncode == 0, told
        return cast("list[frozenset[int]]", pickle.loads(result_file.read_bytes()))


def main(job_file: str, result_file: str) -> None:
    """The other process's side."""
    from llmkit.testing.conformance.target import conformance_of
    from llmkit.testing.grammar import allowed

    kind, choice, given, device, vocabulary, compiled = pickle.loads(Path(job_file).read_bytes())
    compiler: GrammarCompiler = conformance_of(kind, choice, given, device).create(vocabulary=vocabulary)
    grammars = [compiler.load(request, data).start() for request, data in compiled]
    Path(result_file).write_bytes(pickle.dumps([allowed(grammar, vocabulary) for grammar in grammars]))


if __name__ == "__main__":
    main(*sys.argv[1:])
