"""The tutorial's package, installed into a fresh environment and used there."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "llmkit-shortest-first"

USE = """
import json, sys
from llmkit import LLM, SamplingParams

settings = {"load_format": "dummy", "skip_tokenizer": True, "dtype": "float32", "max_num_seqs": 1}
settings |= {"kernels": "torch", "attention": {"backend": "torch"}}
llm = LLM(sys.argv[1], scheduler={"policy": "shortest-first"}, **settings)
params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, detokenize=False)
prompts = [{"prompt_token_ids": [5] * length} for length in (9, 3, 6)]
outputs = llm.generate(prompts, params, use_tqdm=False)
chosen = [s.distribution for s in llm.engine.prepared.registry.selections if s.kind == "scheduler"]
print(json.dumps({"counts": [len(o.outputs[0].token_ids) for o in outputs], "chosen": chosen}))
llm.close()
"""


@pytest.fixture(scope="module")
def environment(fresh_environment):
    """A new environment with the example installed in it as a user would."""
    made = fresh_environment()
    source = made.folder / "source"
    shutil.copytree(EXAMPLE, source)
    made.install(source)
    return made


def test_it_is_listed_and_inspected(environment):
    rows = json.loads(environment.run("-m", "llmkit_cli", "plugins", "list", "--json"))
    assert ("scheduler", "shortest-first", "llmkit-shortest-first") in {
        (row["kind"], row["name"], row["distribution"]) for row in rows
    }
    assert "max_overtakes" in environment.run("-m", "llmkit_cli", "plugins", "inspect", "scheduler:shortest-first")


def test_it_runs_when_it_is_chosen(environment, tmp_path, tiny_model):
    (tmp_path / "config.json").write_text(json.dumps(tiny_model), encoding="utf-8")
    result = json.loads(environment.run("-c", USE, str(tmp_path)).splitlines()[-1])
    assert result == {"counts": [2, 2, 2], "chosen": ["llmkit-shortest-first"]}


@pytest.mark.model
def test_the_commands_of_the_tutorial_work_in_its_order(environment, smollm2_gguf):
    """Those behind the installation, which `environment` has done."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^    ((?:pip|llmkit|pytest) .*)$", text, re.MULTILINE)]
    assert [command[:2] for command in commands[:1]] == [["pip", "install"]]
    assert [command[0] for command in commands[1:]] == ["llmkit", "pytest", "llmkit", "llmkit"]
    inspect, conformance, _, generate = commands[1:]
    assert "max_overtakes" in environment.run("-m", "llmkit_cli", *inspect[1:])
    output = environment.run("-m", "pytest", "-p", "no:cacheprovider", "--llmkit-device=cpu", *conformance[1:])
    assert " passed" in output
    small = ["--temperature", "0", "--max-tokens", "3", "--num-blocks", "64", "--num-threads", "1"]
    generate[generate.index("--model") + 1] = str(smollm2_gguf)
    assert environment.run("-m", "llmkit_cli", *generate[1:], *small).startswith(" Paris.")


def test_its_own_tests_and_the_conformance_suites_pass(environment):
    output = environment.run("-m", "pytest", "-v", "-p", "no:cacheprovider", "--llmkit-device=cpu", cwd=EXAMPLE)
    assert "tests/test_policy.py::test_removed_requests_are_gone PASSED" in output
    assert "scheduler_suite::test_random_load_is_answered_right[scheduler:shortest-first] PASSED" in output
