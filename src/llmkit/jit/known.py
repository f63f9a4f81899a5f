"""Which sets of compiled kernels lie in the cache: written down once all of a set are there, for later starts.

numba alone does not tell before a kernel is asked for. A note holds what its kernels were made of: the files of their
code, numba's version, the processor. Once any of that is another, the set counts as unknown again.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmkit.jit import runtime


def is_known(users: str) -> bool:
    """Whether all kernels that `users` need have been compiled before, by what they are made of now. users: names what
    needs them; the same words for the same kernels."""
    path = _note(users)
    if path is None:
        return False
    try:
        noted = json.loads(path.read_text(encoding="utf-8"))
        return bool(noted == _made_of(noted["files"]))
    except (OSError, ValueError, TypeError, KeyError):
        return False


def remember(users: str) -> None:
    """All kernels that `users` need have been compiled in this process. Without a cache this does nothing."""
    path = _note(users)
    if path is None:
        return
    with suppress(OSError):
        text = json.dumps(_made_of(sorted(runtime.source_files())))
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)


def _note(users: str) -> Path | None:
    folder = runtime.cache_path()
    return None if folder is None else folder / f"{hashlib.sha256(users.encode()).hexdigest()[:16]}.known"


def _made_of(files: Any) -> dict[str, Any]:
    """Raises OSError for a file that is not there."""
    import numba
    from numba.core.codegen import get_host_cpu_features

    stamps = {name: [(stat := Path(name).stat()).st_mtime_ns, stat.st_size] for name in files}
    return {"files": stamps, "numba": numba.__version__, "processor": get_host_cpu_features()}
