"""A package whose policies break every rule, installed and chosen: no request is lost, and the faults are shown."""

import json

import pytest

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "llmkit-hostile"
version = "0.3.0"
dependencies = ["llmkit"]

[project.entry-points."llmkit.schedulers"]
hostile = "llmkit_hostile:Hostile"
sleepy = "llmkit_hostile:Sleepy"

[tool.hatch.build.targets.wheel]
packages = ["llmkit_hostile"]
"""

CODE = '''
import time

from llmkit.hookspecs import PluginInfo, hookimpl


class Hostile:
    """Nonsense, exceptions, and forgotten requests."""

    info = PluginInfo(summary="breaks every rule")

    @hookimpl
    def llmkit_scheduler_policy(self):
        from llmkit.testing.hostile_policy import HostilePolicy

        return HostilePolicy(seed=7)


class Sleepy:
    """Right answers, after a while."""

    info = PluginInfo(summary="takes its time")

    @hookimpl
    def llmkit_scheduler_policy(self):
        from llmkit.testing.hostile_policy import HostilePolicy

        class Slow(HostilePolicy):
            def admit(self, request, load):
                time.sleep(1.01)
                return True

            def _maybe_raise(self):
                pass

        return Slow(honesty=1.0)
'''

USE = """
import json, sys
from llmkit import LLM, SamplingParams

def run(policy):
    settings = {"load_format": "dummy", "skip_tokenizer": True, "dtype": "float32", "num_threads": 1}
    # Nothing that would be compiled into the new cache.
    settings |= {"kernels": "torch", "attention": {"backend": "torch"}}
    settings |= {"scheduler": {"policy": policy, "max_num_seqs": 4}, "num_blocks": 12, "block_size": 4}
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [number % 50] * (1 + number)} for number in range(36)]
    # Eleven blocks are too few for four requests at once, so somebody is preempted now and then.
    with LLM(sys.argv[1], **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        faults = {name: [f.num_faults, f.state, f.last_fault] for name, f in llm.stats().plugin_faults.items()}
        return {"tokens": [o.outputs[0].token_ids for o in outputs], "faults": faults}

print(json.dumps({policy: run(policy) for policy in ("fcfs", "hostile", "sleepy")}))
"""


@pytest.fixture(scope="module")
def environment(fresh_environment):
    made = fresh_environment()
    source = made.folder / "source"
    (source / "llmkit_hostile").mkdir(parents=True)
    (source / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (source / "llmkit_hostile" / "__init__.py").write_text(CODE, encoding="utf-8")
    made.install(source)
    return made


def test_nothing_is_lost_and_the_doctor_knows(environment, tmp_path, tiny_model):
    cache = {"LLMKIT_CACHE": str(tmp_path / "cache")}  # where faults are noted
    (tmp_path / "config.json").write_text(json.dumps(tiny_model), encoding="utf-8")
    told = json.loads(environment.run("-c", USE, str(tmp_path), **cache).splitlines()[-1])
    honest = told["fcfs"]
    assert honest["faults"] == {}
    assert [len(tokens) for tokens in honest["tokens"]] == [6] * 36
    for policy in ("hostile", "sleepy"):
        assert told[policy]["tokens"] == honest["tokens"], "the same answers, whoever goes first"
        ((name, (count, state, _)),) = told[policy]["faults"].items()
        assert (name, state) == (f"scheduler:{policy}", "open")
        assert count >= 5
    assert told["sleepy"]["faults"]["scheduler:sleepy"] == [5, "open", "admit() took 1.0 s"]
    doctor = environment.run("-m", "llmkit_cli", "plugins", "doctor", "--device", "cpu", "--json", **cache)
    faults = {row["name"]: row["faults"] for row in json.loads(doctor) if row["distribution"] == "llmkit-hostile"}
    assert faults["sleepy"]["last_fault"] == "admit() took 1.0 s"
    assert faults["hostile"]["version"] == "0.3.0"
