"""`llmkit plugins new`: what it writes is a package that passes its own checks, installs, and runs when chosen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from llmkit_cli.scaffold.naming import MAX_LENGTH, package_names
from llmkit_cli.scaffold.package import kinds_with_template, write_package

DEEP = os.environ.get("LLMKIT_DEEP_TESTS") == "1"

PLUGINS = {
    "scheduler": "new-policy",
    "attention": "new-attention",
    "structured": "new-grammar",
    "connector": "new-connector",
    "model": "NewForCausalLM",
    "kernels": "new-kernels",
    "quantization": "new-bits",
    "weights": "new-format",
    "tool_parser": "new-calls",
    "reasoning_parser": "new-thoughts",
    "command": "new-command",
    "extension": "new-watcher",
}

MODEL = {
    "architectures": ["NewForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}

# The command line, in a process that does one thing more before the engine closes, and tells which plugins it was made
# of and what they did.
RUN = """
import json, sys
from llmkit import LLM, SamplingParams

close = LLM.close

def telling_close(self):
    if self._engine is not None:
        choice = SamplingParams(max_tokens=8, structured_outputs={"choice": ["yes", "maybe"]})
        answer = self.generate("?", choice, use_tqdm=False)[0].outputs[0].text
        chosen = {s.kind: f"{s.distribution}:{s.name}" for s in self.engine.prepared.registry.selections}
        calls = {t.kind: sum(c.calls for c in t.calls.values()) for t in self.plugin_timings()}
        faults = len(self.stats().plugin_faults)
        told.append({"answer": answer, "chosen": chosen, "calls": calls, "faults": faults})
    close(self)

told = []
LLM.close = telling_close
from llmkit_cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps(told and told[0]))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A package with a plugin of every kind that has a template."""
    folder = tmp_path_factory.mktemp("new")
    pairs = [f"{kind}:{name}" for kind, name in PLUGINS.items()]
    command = [sys.executable, "-m", "llmkit_cli", "plugins", "new", *pairs, "--package", "llmkit-new"]
    subprocess.run([*command, "--dir", str(folder)], check=True, capture_output=True)
    return folder / "llmkit-new"


@pytest.fixture(scope="module")
def environment(package, fresh_environment, tmp_path_factory):
    """A fresh environment with the package's wheel in it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=package, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    made = fresh_environment()
    made.install(wheel)
    return made


@pytest.fixture(scope="module")
def package_of_long_names(tmp_path_factory):
    """The same with names as long as they may be: lines that were full before are too long now."""
    folder = tmp_path_factory.mktemp("long")
    pairs = [(kind, f"{kind}-{'x' * MAX_LENGTH}"[:MAX_LENGTH]) for kind in PLUGINS]
    write_package(package_names(pairs, "p" * MAX_LENGTH, kinds_with_template()), folder)
    return folder / ("p" * MAX_LENGTH)


@pytest.mark.parametrize("fixture", ["package", "package_of_long_names"])
def test_it_is_linted_and_formatted(fixture, request):
    for command in (["check", "."], ["format", "--check", "."]):
        folder = request.getfixturevalue(fixture)
        done = subprocess.run([sys.executable, "-m", "ruff", *command], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.skipif(not DEEP, reason="takes a quarter of a minute: LLMKIT_DEEP_TESTS=1")
def test_its_types_are_right(package):
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=package, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_its_own_tests_and_the_conformance_kit_pass(environment, package):
    """The suite of attention takes a while, so it has a turn of its own."""
    quick = () if DEEP else ("-k", "not attention_suite")
    out = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *quick, cwd=package)
    tried = dict(re.findall(r"^(\w+):(\S+) \(llmkit-new 0\.1\.0\): import", out, re.MULTILINE))
    assert tried == PLUGINS


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model without weights whose tokens are bytes, of the architecture that the package brings."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    alphabet = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    return folder


def test_each_is_chosen_by_flag_and_used(environment, model):
    flags = {
        "--model": str(model),
        "--load-format": "dummy",
        "--scheduler": PLUGINS["scheduler"],
        "--attention": PLUGINS["attention"],
        "--structured": PLUGINS["structured"],
        "--connector": PLUGINS["connector"],
        "--kernels": PLUGINS["kernels"],
        "--quantization": PLUGINS["quantization"],
        "--extensions": PLUGINS["extension"],
        "--num-blocks": "64",
        "--num-threads": "1",
        "--max-tokens": "5",
    }
    options = [part for flag in flags.items() for part in flag]
    prompts = ["a" * 50, "a" * 50, "b"]
    *answers, told = environment.run("-c", RUN, "generate", "--json", "--ignore-eos", *options, *prompts).splitlines()
    assert [len(json.loads(answer)["outputs"][0]["token_ids"]) for answer in answers] == [5, 5, 5]
    told = json.loads(told)
    chosen = {"scheduler", "attention", "connector", "model", "kernels", "quantization", "extension"}
    assert {kind: told["chosen"][kind] for kind in chosen} == {k: f"llmkit-new:{PLUGINS[k]}" for k in chosen}
    used = ("scheduler", "attention", "structured", "connector", "model", "extension")
    assert all(told["calls"][kind] for kind in used)
    assert told["answer"] in ("yes", "maybe")
    assert told["faults"] == 0


def test_its_command_is_one_of_llmkit(environment):
    out = environment.run("-m", "llmkit_cli", "new-command")
    counted = dict(line.split() for line in out.splitlines())
    assert int(counted["scheduler"]) >= 3
    assert counted["command"] == "1"
