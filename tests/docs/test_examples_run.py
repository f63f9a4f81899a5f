"""The code in README and documentation runs as it stands there, where it generates with the real model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from llmkit import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
FRANCE = "The capital of France is"

PLUGIN_PAGES = ROOT / "docs" / "plugins"
ENVIRONMENT = {"LLMKIT_NUM_BLOCKS": "256", "LLMKIT_NUM_THREADS": "1"}


def needs_model(test):
    return pytest.mark.model(pytest.mark.usefixtures("smollm2_gguf")(test))


def code_blocks(page: str, language: str = "python") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def run(tmp_path):
    """Runs Python with these arguments in an empty folder, whose modules it finds; its output."""

    def process(*arguments):
        env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return process


@pytest.fixture
def run_here(tmp_path, monkeypatch, capsys):
    """Runs a program in an empty folder and in this process, which has the libraries loaded; its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)

    def execute(code):
        exec(compile(code, "example", "exec"), {"__name__": "__main__"})
        return capsys.readouterr().out

    return execute


@needs_model
def test_python_of_the_readme_in_a_process_of_its_own(run):
    assert run("-c", code_blocks("README.md")[0]).startswith(" Paris")


@needs_model
def test_the_plugin_of_the_readme_serves(tmp_path, run_here, monkeypatch):
    plugin = code_blocks("README.md")[1]
    assert plugin.startswith("# shortest_first.py\n")
    assert len([line for line in plugin.splitlines() if line and not line.startswith("#")]) <= 25
    (tmp_path / "shortest_first.py").write_text(plugin, encoding="utf-8")
    monkeypatch.delitem(sys.modules, "shortest_first", raising=False)
    # An installed command does not have the current folder among its modules.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    flags = ["--model", "smollm2-135m-instruct", "--temperature", "0", "--max-tokens", "4", "--dtype", "float32"]
    (scheduler,) = re.findall(r"--scheduler (shortest_first\S*)", (ROOT / "README.md").read_text(encoding="utf-8"))
    arguments = ["generate", "--scheduler", scheduler.rstrip("`"), *flags, FRANCE]
    out = run_here(
        "from llmkit_cli.main import main\n"
        f"try:\n    main({arguments})\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
    )
    assert out.startswith(" Paris.")
    assert Path(sys.modules["shortest_first"].__file__).parent == tmp_path


def test_the_plugin_of_the_readme_installs(tmp_path):
    """With the pyproject.toml that stands beside it, as `pip install .` would, into a folder of its own."""
    project, installed = tmp_path / "project", tmp_path / "installed"
    project.mkdir()
    (project / "shortest_first.py").write_text(code_blocks("README.md")[1], encoding="utf-8")
    (pyproject,) = code_blocks("README.md", "toml")
    (project / "pyproject.toml").write_text(pyproject, encoding="utf-8")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(installed), str(project)], check=True
    )
    done = subprocess.run(
        [sys.executable, "-m", "llmkit_cli", "plugins", "inspect", "scheduler:shortest-first"],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "shortest prompt first" in done.stdout
    assert "llmkit-shortest" in done.stdout


def test_the_plugin_of_the_readme_passes_the_conformance_suite(run_here):
    check = "from llmkit.testing.scheduling import check_policy\n"
    run_here(f"{check}{code_blocks('README.md')[1]}\ncheck_policy(ShortestFirst)")


@needs_model
@pytest.mark.parametrize("page", ["getting-started", "chat"])
def test_python_of_the_guides(run_here, page):
    for block in code_blocks(f"docs/{page}.md"):
        assert run_here(block).strip()


@needs_model
def test_python_of_the_plugins_page(run_here):
    (block,) = code_blocks("docs/plugins/index.md")
    out = run_here(block)
    assert out.startswith(" Paris")
    assert "scheduler:mine: create" in out


@pytest.fixture
def example():
    """kind → the module that its page shows, behind others for single hooks."""

    def load(kind):
        block = code_blocks(f"docs/plugins/{kind}.md")[-1]
        module = types.ModuleType(f"example_{kind}")
        exec(compile(block, f"docs/plugins/{kind}.md", "exec"), vars(module))
        return module

    return load


EXAMPLES = [
    "scheduler",
    "kernels",
    "quantization",
    "extension",
    "weights",
    "model",
    "command",
    "tool_parser",
    "reasoning_parser",
]


def test_the_route_of_the_extension_page_answers(llmkit_registry):
    import fastapi
    from fastapi.testclient import TestClient

    route = types.ModuleType("example_route")
    exec(code_blocks("docs/plugins/extension.md")[0], vars(route))
    assert llmkit_registry.register("extension", "example", route).info.summary

    async def stats():
        return types.SimpleNamespace(kv_usage=0.5)

    app = fastapi.FastAPI()
    route.llmkit_server_routes(app, types.SimpleNamespace(llm=types.SimpleNamespace(stats=stats)))
    assert TestClient(app).get("/fill").json() == {"kv_usage": 0.5}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_examples_of_the_kinds_are_plugins(example, kind, llmkit_registry):
    loaded = llmkit_registry.register(kind, "example", example(kind))
    assert loaded.info.summary


TINY = {
    "architectures": ["Example"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def test_examples_of_the_kinds_make_an_engine(example, llmkit_registry, capsys):
    """All at once: model, scheduler, kernels, quantization, extension."""
    for kind in ("scheduler", "kernels", "quantization", "extension"):
        llmkit_registry.register(kind, "example", example(kind))
    llmkit_registry.register("model", "Example", example("model"))
    settings = {"load_format": "dummy", "num_blocks": 64, "num_threads": 1, "extensions": ["example"]}
    chosen = dict.fromkeys(("scheduler.policy", "execution.kernels", "model.quantization"), "example")
    with LLM(overrides=TINY, registry=llmkit_registry, **settings, **chosen) as llm:
        output = llm.generate(list(range(40)), SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0]
        assert len(llm.engine.layout.groups) == 2
    assert len(output.outputs[0].token_ids) == 4
    assert "4 blocks cached" in capsys.readouterr().out


def test_the_example_of_weights_reads_its_format(example, llmkit_registry, tmp_path):
    import numpy as np

    from llmkit.registry import detect_environment
    from llmkit.testing.conformance.arguments import small_context

    config = TINY | {"architectures": ["LlamaForCausalLM"]}
    context = small_context(llmkit_registry, detect_environment(), "LlamaForCausalLM", head_dim=None, **TINY)
    model = llmkit_registry.create("model", "LlamaForCausalLM", detect_environment(), context=context)
    draw = np.random.default_rng(0)
    tensors = {name: draw.normal(size=shape).astype("float32") for name, shape in model.weight_shapes().items()}
    np.savez(tmp_path / "weights.npz", **tensors)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    llmkit_registry.register("weights", "npz", example("weights"))
    with LLM(tmp_path, registry=llmkit_registry, load_format="npz", num_blocks=16, num_threads=1) as llm:
        assert llm.generate([1, 2, 3], SamplingParams(max_tokens=2))[0].finished


def test_tests_of_the_testing_page_pass(tmp_path, run):
    source = "\n\n".join(code_blocks("docs/plugins/testing.md"))
    (tmp_path / "test_mine.py").write_text(source, encoding="utf-8")
    assert "4 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py")
