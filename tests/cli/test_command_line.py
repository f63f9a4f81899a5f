"""The command line: help, errors as one paragraph, exit codes, configuration and plugins."""

import io
import json
import os
import subprocess
import sys

import pytest

from llmkit.registry import Registry, detect_environment
from llmkit_cli.main import main, take_debug_flag


@pytest.fixture
def llmkit(capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        output = capsys.readouterr()
        return exit_info.value.code or 0, output.out, output.err

    return run


def in_process(code, **env):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, check=True).stdout


COMMANDS = [
    "generate",
    "chat",
    "complete",
    "run-batch",
    "serve",
    "plugins",
    "config",
    "models",
    "bench",
    "profile",
    "collect-env",
]


def test_help_lists_every_command(llmkit):
    code, out, _ = llmkit("--help")
    assert code == 0
    for command in COMMANDS:
        assert command in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(llmkit, command):
    code, out, _ = llmkit(command, "--help")
    assert code == 0
    assert f"llmkit {command}" in out


@pytest.mark.parametrize("command", [("generate",), ("chat",), ("serve",), ("config", "show"), ("bench", "latency")])
def test_help_cuts_no_flag_in_a_terminal_of_80_columns(command):
    environment = {**os.environ, "COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    result = subprocess.run(
        [sys.executable, "-m", "llmkit_cli", *command, "--help"],
        capture_output=True,
        encoding="utf-8",
        env={**environment, "PYTHONIOENCODING": "utf-8"},
        check=True,
    )
    assert "…" not in result.stdout
    for flag in ("--max-num-batched-tokens", "--gpu-memory-utilization", "--no-enable-prefix-caching"):
        assert flag in result.stdout


def test_a_module_of_the_current_folder_is_a_plugin(llmkit, tmp_path, monkeypatch):
    """As an installed command `llmkit` does not have the current folder in sys.path."""
    (tmp_path / "mine_of_the_folder.py").write_text(
        "from llmkit.hookspecs import PluginInfo, hookimpl\n"
        "info = PluginInfo(summary='a queue')\n"
        "@hookimpl\n"
        "def llmkit_scheduler_policy():\n"
        "    raise RuntimeError('asked for a policy')\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    flags = ("--model", str(shape), "--load-format", "dummy", "--skip-tokenizer", "--num-blocks", "16", "--dry-run")
    code, _, err = llmkit("generate", "--scheduler", "mine_of_the_folder:", *flags)
    assert code == 1
    assert "asked for a policy" in err

    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    code, _, err = llmkit("generate", "--scheduler", "fcfs", *flags)
    assert code == 0, err
    assert str(tmp_path) not in sys.path  # nothing asked for it


TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}


def test_engine_commands_offer_the_plugin_flags(llmkit):
    from llmkit.hookspecs.kinds import KINDS

    flags = {kind.flag for kind in KINDS if kind.flag}
    of_the_server = {kind.flag for kind in KINDS if kind.flag and str(kind.config_key).startswith("server.")}
    assert of_the_server
    for command, offered in (("generate", flags - of_the_server), ("serve", flags)):
        _, out, _ = llmkit(command, "--help")
        assert not [flag for flag in offered if flag not in out]
        assert "--set" in out
        assert "--config" in out


@pytest.mark.parametrize("call", ["import llmkit", "import llmkit_cli.main; llmkit_cli.main.root_app()"])
def test_neither_import_nor_help_loads_torch(call):
    out = in_process(f"{call}\nimport sys; print(sorted({{'torch', 'transformers', 'numba'}} & set(sys.modules)))")
    assert out.strip() == "[]"


def test_version(llmkit):
    import llmkit as package

    assert llmkit("--version") == (0, f"llmkit {package.__version__}\n", "")


def test_an_unknown_command_is_a_usage_error(llmkit):
    code, _, err = llmkit("genrate")
    assert code == 2
    assert "genrate" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["config", "show", "--max-num-seqs", "0"], 2, ["max_num_seqs", "at least 1"]),
        (["config", "show", "--set", "scheduler.nonsense=1"], 2, ["nonsense"]),
        (["config", "show", "--set", "broken"], 2, ["KEY=VALUE"]),
        (["config", "show", "--gpu-memory-utilization", "1.5"], 2, ["gpu_memory_utilization"]),
        (["config", "show", "--config", "/nowhere/a.yaml"], 2, ["/nowhere/a.yaml"]),
        (["config", "show", "--block-size", "-1"], 2, ["block_size"]),
        (["plugins", "inspect", "scheduler"], 2, ["KIND:NAME"]),
        (["plugins", "inspect", "schedular:fcfs"], 2, ["schedular"]),
        (["plugins", "inspect", "scheduler:fcsf"], 2, ["fcsf", "fcfs"]),
        (["generate", "--model", "any", "--scheduler", "fcsf", "hello"], 1, ["any"]),
        (["models", "pull", "no-such-model"], 1, ["no-such-model"]),
        (["generate", "--model", "/nowhere/model", "hello"], 1, ["/nowhere/model"]),
        (["generate", "--model", "/nowhere/model", "--top-p", "2", "hello"], 2, ["top_p"]),
        (["chat", "--model", "/nowhere/model", "--max-tokens", "0"], 2, ["max_tokens"]),
        (["generate", "hello"], 2, ["No model", "llmkit models list"]),
        (["generate", "--model", "any"], 2, ["No prompt", "--prompts-file"]),
        (["bench", "latency", "--shape", "gpt-9"], 2, ["gpt-9", "smollm2-135m"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_errors_are_one_paragraph_without_a_traceback(llmkit, monkeypatch, arguments, code, words):
    """B80, B82 and others."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    actual, _, err = llmkit(*arguments)
    assert actual == code
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "a", "max_tokens": 3}, ["prompts.jsonl:2", "'max_tokens'", "prompt, user, priority"]),
        ({"prompt": 3}, ["prompts.jsonl:2", '"prompt"']),
        (["a"], ["prompts.jsonl:2", '"prompt"']),
    ],
)
def test_a_line_of_a_prompts_file_that_cannot_be_meant(llmkit, tmp_path, line, words):
    """Refused before a model is looked for: a parameter that is passed over in silence would change the answers."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a", "user": "u", "priority": 1}) + "\n" + json.dumps(line))
    code, _, err = llmkit("generate", "--model", "/nowhere/model", "--prompts-file", str(file))
    assert code == 2
    assert len(err.splitlines()) == 1
    for word in words:
        assert word in err


@pytest.mark.parametrize("line", ["[" * 100_000, '{"prompt": ' + "9" * 5000 + "}", "{"])
def test_a_line_of_a_prompts_file_that_cannot_be_read(llmkit, tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n' + line.encode())
    code, _, err = llmkit("generate", "--model", "/nowhere/model", "--prompts-file", str(file))
    assert code == 2
    assert "prompts.jsonl:2 is not JSON: " in err


@pytest.mark.parametrize("name", ["fcsf", "llmkit:nope", "json:nope", "no_such_package:nope"])
def test_a_plugin_that_does_not_exist_is_a_usage_error(llmkit, name):
    code, _, err = llmkit("bench", "latency", "--shape", "smollm2-135m", "--dry-run", "--scheduler", name)
    assert code == 2
    assert name.rpartition(":")[2] in err
    assert len(err.splitlines()) == 1


def test_debug_shows_the_traceback(llmkit):
    code, _, err = llmkit("config", "show", "--max-num-seqs", "0", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert err.strip().splitlines()[-1].startswith("llmkit:")


def test_debug_is_taken_only_before_the_end_of_options():
    assert take_debug_flag(["generate", "--debug", "x"]) == (["generate", "x"], True)
    assert take_debug_flag(["generate", "--", "--debug"]) == (["generate", "--", "--debug"], False)


@pytest.mark.parametrize("spelling", ["--config={}", "--config {}"])
def test_config_show_names_every_source(llmkit, tmp_path, monkeypatch, spelling):
    """B80."""
    file = tmp_path / "engine.yaml"
    file.write_text("enable-prefix-caching: false\nmax_model_len: 64\n", encoding="utf-8")
    monkeypatch.setenv("LLMKIT_MAX_NUM_SEQS", "7")
    given = spelling.format(file).split(" ")
    code, out, _ = llmkit("config", "show", *given, "--max-model-len", "32", "--json")
    assert code == 0
    rows = {row["key"]: row for row in json.loads(out)}
    assert rows["kv_cache.enable_prefix_caching"]["value"] is False
    assert "engine.yaml" in rows["kv_cache.enable_prefix_caching"]["source"]
    assert rows["model.max_model_len"]["value"] == 32
    assert rows["model.max_model_len"]["source"].startswith("flag")
    assert rows["scheduler.max_num_seqs"]["value"] == 7
    assert rows["scheduler.max_num_seqs"]["source"].startswith("env")
    assert rows["model.dtype"]["source"] == "default"


def test_plugins_of_one_kind(llmkit):
    _, out, _ = llmkit("plugins", "list", "scheduler")
    assert "fcfs" in out
    assert "attention" not in out
    _, out, _ = llmkit("plugins", "list", "connector")
    assert out.startswith("connector")


def test_plugins_list_and_inspect_as_json(llmkit):
    _, out, _ = llmkit("plugins", "list", "--json")
    names = {(row["kind"], row["name"]) for row in json.loads(out)}
    assert {("scheduler", "fcfs"), ("attention", "torch"), ("weights", "gguf")} <= names
    _, out, _ = llmkit("plugins", "inspect", "scheduler:priority", "--json")
    facts = json.loads(out)
    assert facts["distribution"] == "llmkit"
    assert [option["name"] for option in facts["options"]] == ["aging_s", "aging_levels"]


def test_doctor_judges_for_the_device(llmkit):
    _, out, _ = llmkit("plugins", "doctor", "--device", "cpu", "--json")
    rows = {(row["kind"], row["name"]): row for row in json.loads(out)}
    assert not [row for row in rows.values() if not (row["found"] and row["loadable"])]
    assert rows["scheduler", "fcfs"]["selected"]
    assert rows["attention", "torch"]["usable"]


def test_doctor_selects_nothing_where_that_takes_a_model(llmkit, tmp_path):
    _, out, _ = llmkit("plugins", "doctor", "--device", "cpu", "--json")
    assert not [
        row["name"] for row in json.loads(out) if row["kind"] in ("quantization", "weights") and row["selected"]
    ]
    (line,) = [line for line in llmkit("plugins", "doctor", "--device", "cpu")[1].splitlines() if "depends" in line]
    assert "weights, quantization" in line
    file = tmp_path / "engine.toml"
    file.write_text('[model]\nquantization = "int8"\n', encoding="utf-8")
    _, out, _ = llmkit("plugins", "doctor", "--device", "cpu", "--config", str(file))
    assert "quantization:int8 (selected)" in out
    assert "quantization" not in out.splitlines()[-1]


def test_doctor_judges_for_a_device_that_is_not_here(llmkit, tmp_path):
    file = tmp_path / "engine.toml"
    file.write_text('[scheduler]\npolicy = "priority"\n', encoding="utf-8")
    code, out, _ = llmkit("plugins", "doctor", "--device", "cuda", "--json", "--config", str(file))
    assert code == 0
    rows = {(row["kind"], row["name"]): row for row in json.loads(out)}
    assert rows["attention", "torch"]["usable"]
    assert not rows["attention", "cpu"]["usable"]
    assert "CPU" in rows["attention", "cpu"]["reasons"][0]
    assert [name for (kind, name), row in rows.items() if kind == "scheduler" and row["selected"]] == ["priority"]
    assert llmkit("plugins", "doctor", "--device", "tpu")[0] == 2


def test_doctor_tells_of_faults_in_engines_that_are_gone(llmkit, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMKIT_CACHE", str(tmp_path))
    registry = Registry.discover()
    registry.create("scheduler", "fcfs", detect_environment())
    for _ in range(5):
        registry.breakers().of("scheduler", "fcfs").record("unheard")
    assert "unheard" not in llmkit("plugins", "doctor", "--device", "cpu")[1], "a breaker each, none of them opened"
    breaker = registry.breakers().of("scheduler", "fcfs")
    for _ in range(5):
        breaker.record("victim() took 7.0 s")
    _, out, _ = llmkit("plugins", "doctor", "--device", "cpu")
    assert "failed so often that it was left alone, once, last on" in out
    assert "after 5 faults: victim() took 7.0 s" in out
    _, out, _ = llmkit("plugins", "doctor", "--device", "cpu", "--json")
    faults = {row["name"]: row["faults"] for row in json.loads(out) if row["kind"] == "scheduler"}
    assert faults.pop("fcfs")["num_faults"] == 5
    assert set(faults.values()) == {None}
    _, out, _ = llmkit("plugins", "doctor", "--device", "cpu", "--forget-faults")
    assert "left alone" not in out


def test_doctor_tells_of_faults_of_a_plugin_given_by_its_path(llmkit, tmp_path, monkeypatch):
    monkeypatch.setenv("LLMKIT_CACHE", str(tmp_path))
    choice = "llmkit_schedulers.fcfs:"
    registry = Registry.discover()
    registry.create("scheduler", choice, detect_environment())
    breaker = registry.breakers().of("scheduler", choice)
    for _ in range(5):
        breaker.record("victim() took 7.0 s")
    _, out, _ = llmkit("plugins", "doctor", "--device", "cpu")
    told = out[out.index(f"scheduler:{choice}") :]
    assert "after 5 faults: victim() took 7.0 s" in told
    assert "belongs to no package" in told
    monkeypatch.setenv("LLMKIT_SCHEDULER", choice)
    _, out, _ = llmkit("plugins", "doctor", "--device", "cpu", "--json")
    [chosen] = [row for row in json.loads(out) if row["name"] == choice]
    assert chosen["selected"]
    assert chosen["faults"]["num_faults"] == 5
    _, out, _ = llmkit("plugins", "doctor", "--device", "cpu", "--forget-faults")
    assert "victim()" not in out


def test_collect_env_as_json(llmkit):
    code, out, _ = llmkit("collect-env", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["packages"]["torch"] != "not installed"
    assert "fcfs" in facts["plugins"]["scheduler"]


def test_no_prompt_is_a_usage_error(llmkit, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    code, _, err = llmkit("generate", "--model", "whatever")
    assert code == 2
    assert "prompt" in err


def test_dry_run_of_a_shape_loads_nothing(llmkit):
    code, out, err = llmkit(
        "bench", "latency", "--shape", "qwen3-0.6b", "--dry-run", "--dtype", "bfloat16", "--num-blocks", "64"
    )
    assert code == 0, err
    assert "Qwen3ForCausalLM" in out
    assert "GiB" in out
    assert "fcfs: the best of 5 usable ones (rank 10: first come, first served" in out
    assert "not srtf: fcfs has rank 10, this rank 0: shortest remaining answer first" in out
    assert "inline: the only usable one" in out


def test_bench_on_a_small_shape(llmkit, tmp_path, monkeypatch):
    from llmkit_cli.bench import shapes, workloads

    tiny = {**shapes.SHAPES["smollm2-135m"], "num_hidden_layers": 1, "vocab_size": 128}
    monkeypatch.setitem(shapes.SHAPES, "tiny", tiny)
    monkeypatch.setenv("LLMKIT_NUM_THREADS", "1")  # also for the process that measures the start
    monkeypatch.setattr(workloads, "workload", lambda *_: [workloads.WorkItem([5, 6, 7], 4)] * 2)
    for what in ("latency", "throughput", "startup"):
        result = tmp_path / f"{what}.json"
        flags = ["--runs", "1", "--json", "--output", str(result), "--dtype", "float32", "--num-blocks", "64"]
        code, out, err = llmkit("bench", what, "--shape", "tiny", *flags)
        assert code == 0, err
        assert json.loads(out) == json.loads(result.read_text(encoding="utf-8"))
        assert json.loads(out)["figures"]
        limits = json.loads(out).get("limits", {})
        for fraction in {"latency": ["decode"], "throughput": ["read", "matmul"]}.get(what, []):
            assert 0 < limits[f"{fraction}_fraction"] < 2


def test_plugin_commands_are_mounted(tmp_path):
    package = tmp_path / "third_party-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n", encoding="utf-8")
    (package / "entry_points.txt").write_text("[llmkit.commands]\nhello = third_party_hello\n", encoding="utf-8")
    (tmp_path / "third_party_hello.py").write_text(
        "import typer\nfrom llmkit.hookspecs import PluginInfo, hookimpl\n"
        "info = PluginInfo(summary='greets')\napp = typer.Typer()\n"
        "@app.command()\ndef hello(name: str):\n    typer.echo(f'hello {name}')\n"
        "@hookimpl\ndef llmkit_command():\n    return app\n",
        encoding="utf-8",
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    helped = subprocess.run([sys.executable, "-m", "llmkit_cli", "--help"], capture_output=True, text=True, env=env)
    assert "third-party" in helped.stdout
    ran = subprocess.run(
        [sys.executable, "-m", "llmkit_cli", "hello", "world"], capture_output=True, text=True, env=env
    )
    assert ran.stdout == "hello world\n"
    for switch in ({"LLMKIT_SAFE_MODE": "1"}, {"LLMKIT_DISABLE_PLUGINS": "command:hello"}):
        off = subprocess.run(
            [sys.executable, "-m", "llmkit_cli", "hello", "world"], capture_output=True, text=True, env=env | switch
        )
        assert off.returncode == 2
        assert "hello" in off.stderr


BROKEN = {
    "imports": "raise ImportError('no such library')",
    "exits": "raise SystemExit(3)",
    "no_attribute": "",
    "half": "from llmkit.hookspecs import hookimpl\n@hookimpl\ndef llmkit_scheduler_policy(): pass\nraise ValueError",
    "sleeps": "import time\ntime.sleep(60)",
}


def test_broken_plugins_do_not_stop_the_command_line(tmp_path):
    """B76: help and list import none of them; the doctor says of each what is wrong; strict refuses to start."""
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n", encoding="utf-8")
    points = [f"{name} = broken_{name}{':nothing' * (name == 'no_attribute')}" for name in BROKEN]
    (folder / "entry_points.txt").write_text("[llmkit.schedulers]\n" + "\n".join(points), encoding="utf-8")
    for name, source in BROKEN.items():
        (tmp_path / f"broken_{name}.py").write_text(source, encoding="utf-8")

    def run(*arguments, **env):
        command = [sys.executable, "-m", "llmkit_cli", *arguments]
        variables = {**os.environ, "PYTHONPATH": str(tmp_path), **env}
        return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=50)

    assert run("--help").returncode == 0
    listed = json.loads(run("plugins", "list", "scheduler", "--json").stdout)
    assert {row["name"] for row in listed} > {"fcfs", "priority", *BROKEN}
    assert {row["state"] for row in listed} == {"found"}
    disabled = {"LLMKIT_DISABLE_PLUGINS": "scheduler:sleeps"}
    checked = json.loads(run("plugins", "doctor", "--device", "cpu", "--json", **disabled).stdout)
    rows = {row["name"]: row for row in checked if row["kind"] == "scheduler"}
    assert rows["fcfs"]["usable"]
    assert not any(rows[name]["loadable"] for name in BROKEN)
    assert "no such library" in rows["imports"]["reasons"][0]
    assert "SystemExit" in rows["exits"]["reasons"][0]
    assert "'nothing'" in rows["no_attribute"]["reasons"][0]
    assert "ValueError" in rows["half"]["reasons"][0]
    assert "LLMKIT_DISABLE_PLUGINS" in rows["sleeps"]["reasons"][0]
    shape = ("bench", "latency", "--shape", "smollm2-135m", "--dry-run", "--num-blocks", "64")
    assert "fcfs" in run(*shape).stdout
    refused = run(*shape, "--set", "plugins.strict=true", **disabled)
    assert refused.returncode == 1
    assert "broken 1.0" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert run(*shape, "--set", "plugins.strict=true", "--safe-mode").returncode == 0


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_closed_standard_streams(closed):
    """Started so, Python has None for the stream."""
    line = f'"{sys.executable}" -m llmkit_cli generate --model none-such {closed}'
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert result.returncode in (1, 2)
    assert "Unexpected error" not in result.stderr
    assert "Traceback" not in result.stderr
