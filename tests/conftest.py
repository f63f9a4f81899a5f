"""How the tests share the machine, and fixtures for those that need a real model: the SmolLM2 file, and what it must
answer."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from llmkit.cache_folder import cache_folder
from llmkit.errors import ModelError

DATA = Path(__file__).parent / "data"
E2E = Path(__file__).parent / "e2e"
INTERPRETER = Path(__file__).parent / "interpreter"
MAX_WORKERS = 4
SHARED_CACHES = ("models", "kernels", "test-suites")

# Read by OpenMP when torch is loaded, here and in the processes that tests start. One thread by default: tests run side
# by side, and models as small as theirs gain nothing from more. Tests of several threads ask for them; those threads
# sleep while they wait for one another, as they may have to share a processor.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"

# Most engines of the tests compile no grammar: those that should be ready for one ask for it.
os.environ["LLMKIT_STRUCTURED__PRELOAD_GRAMMARS"] = "false"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes of `pytest -n auto`: one more than processors, as many tests wait for processes of their own, and no
    more than a few, as each imports and collects everything for itself and grows to 2 GB."""
    from llmkit.engine.device import usable_processors

    return min(usable_processors() + 1, MAX_WORKERS)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What was collected, and the libraries that were imported for it, live until the end: the garbage collector does
    not look at these millions of objects again, which it otherwise did for half a second whenever an engine starts or
    closes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        set_aside()
        # Tests start pytest more than twenty times, with options of their own. What it would load of other packages
        # takes half of such a start.
        os.environ["PYTEST_ADDOPTS"] = "-p no:schemathesis -p no:hypothesispytest"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """So do the libraries that the tests of a module import: the next module's engines start and close without them."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            set_aside()
            forget_faults()


def set_aside() -> None:
    """Collect garbage once more; what is left is not looked at again."""
    gc.collect()
    gc.freeze()


def forget_faults() -> None:
    """Of plugins that a module's tests made to fail: tests of other modules are told what was noted."""
    shutil.rmtree(cache_folder() / "faults", ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A cache folder of the tests' own, so that the faults of plugins made to fail are not noted where the user's are.
    What is fetched or compiled is the user's too."""
    folder = tempfile.TemporaryDirectory(prefix="llmkit-tests-")
    config.add_cleanup(folder.cleanup)
    for name in SHARED_CACHES:
        (kept := cache_folder() / name).mkdir(parents=True, exist_ok=True)
        (Path(folder.name) / name).symlink_to(kept.resolve(), target_is_directory=True)
    os.environ["LLMKIT_CACHE"] = folder.name


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """At the interpreter's end everything is looked at: libraries count what is left of theirs, and report it."""
    gc.unfreeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest first, then tests with the real model, of them the longest before the others: they must not be
    what everyone waits for at the end, and a process without work takes over the last ones of another."""

    def place(item: pytest.Item) -> tuple[bool, bool, bool]:
        marked = [item.get_closest_marker(name) is not None for name in ("long", "model")]
        return not marked[0], not marked[1], not item.path.is_relative_to(E2E)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Random inputs of a test come from its name and LLMKIT_TEST_SEED (0): the same alone, in any order and process,
    others with another number."""
    seed = zlib.crc32(f"{request.node.nodeid} {os.environ.get('LLMKIT_TEST_SEED', '0')}".encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        # Where there is no GPU, `torch.manual_seed` writes down who called it, for each that might come.
        (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(seed)


@pytest.fixture(scope="session")
def interpreted() -> Callable[..., list[str]]:
    """interpreted(*arguments of pytest, **environment): run tests where Triton interprets its kernels, in a process of
    their own, as the interpreter must be chosen before Triton is imported; ids of the tests that have passed.

    The test fails where one of them does. Folders for imports are added to those in PYTHONPATH."""

    def run(*arguments: str | Path, **environment: str) -> list[str]:
        flags = ["-v", "-x", "--import-mode=importlib", "-p", "quick_interpreter", "-p", "no:cacheprovider"]
        variables = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} | environment
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(INTERPRETER), environment.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "pytest", *flags, *map(str, arguments)]
        done = subprocess.run(command, env=variables, cwd=E2E.parents[1], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        return re.findall(r"^(\S+::.*) PASSED", done.stdout, re.MULTILINE)

    return run


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The SmolLM2 GGUF file in the llmkit cache, fetched if need be; the test is skipped if that is impossible."""
    from llmkit.frontend import model_store

    try:
        return model_store.pull("smollm2-135m-instruct")
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    """20 prompts with their token ids and the greedy float32 continuations that the reference computed."""
    items: list[dict[str, Any]] = json.loads((DATA / "smollm2_f32.json").read_bytes())["items"]
    return items


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a Hugging Face folder in float32 (config.json, tokenizer.json, model.safetensors)."""
    from safetensors.torch import save_file

    from llmkit_weights.gguf_format import GgufFormat

    folder = tmp_path_factory.mktemp("smollm2")
    reader = GgufFormat()
    config = reader.config(smollm2_gguf)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    (folder / "generation_config.json").write_text(json.dumps(reader.generation_config(smollm2_gguf)))
    tokenizer: Any = reader.tokenizer(smollm2_gguf)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = tokenizer.special_tokens | {"chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    save_file(dict(reader.tensors(smollm2_gguf, config)), folder / "model.safetensors")
    return folder
