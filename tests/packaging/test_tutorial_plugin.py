"""The tutorial's package, installed into a fresh environment and used there."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "llmkit-shortest-first"

TINY_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}

USE = """
import json, sys
from llmkit import LLM, SamplingParams

settings = {"load_format": "dummy", "skip_tokenizer": True, "dtype": "float32", "max_num_seqs": 1}
llm = LLM(sys.argv[1], scheduler={"policy": "shortest-first"}, **settings)
params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, detokenize=False)
prompts = [{"prompt_token_ids": [5] * length} for length in (9, 3, 6)]
outputs = llm.generate(prompts, params, use_tqdm=False)
chosen = [s.distribution for s in llm.engine.prepared.registry.selections if s.kind == "scheduler"]
print(json.dumps({"counts": [len(o.outputs[0].token_ids) for o in outputs], "chosen": chosen}))
llm.close()
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """A new environment that sees this one's packages, with the example installed in it as a user would."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    ours = sysconfig.get_paths()["purelib"]
    theirs = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (theirs / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n", encoding="utf-8")
    source = folder / "source"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(source)], check=True)
    install = ["install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", str(source)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    return python


def run(python, *arguments, **more):
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    result = subprocess.run([str(python), *arguments], capture_output=True, text=True, env=env, **more)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_it_is_listed_and_inspected(environment):
    rows = json.loads(run(environment, "-m", "llmkit_cli", "plugins", "list", "--json"))
    assert ("scheduler", "shortest-first", "llmkit-shortest-first") in {
        (row["kind"], row["name"], row["distribution"]) for row in rows
    }
    assert "max_overtakes" in run(environment, "-m", "llmkit_cli", "plugins", "inspect", "scheduler:shortest-first")


def test_it_runs_when_it_is_chosen(environment, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY_MODEL), encoding="utf-8")
    result = json.loads(run(environment, "-c", USE, str(tmp_path)).splitlines()[-1])
    assert result == {"counts": [2, 2, 2], "chosen": ["llmkit-shortest-first"]}


def test_its_own_tests_pass(environment):
    output = run(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE / "tests"), cwd=EXAMPLE)
    assert "3 passed" in output
