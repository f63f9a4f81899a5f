"""generate, chat and bench with the real model."""

import io
import json

import pytest

from llmkit_cli.main import main
from llmkit_cli.sampling_options import sampling_params

pytestmark = pytest.mark.model

FRANCE = "The capital of France is"


@pytest.fixture
def llmkit(capsys, smollm2_gguf, monkeypatch):
    monkeypatch.setenv("LLMKIT_NUM_THREADS", "1")  # others run beside it

    def run(command, *arguments):
        with pytest.raises(SystemExit) as exit_info:
            main([command, "--model", str(smollm2_gguf), "--dtype", "float32", "--num-blocks", "64", *arguments])
        output = capsys.readouterr()
        return exit_info.value.code or 0, output.out, output.err

    return run


def test_zero_is_a_value_and_not_an_absent_flag():
    class Defaults:
        def get_default_sampling_params(self):
            from llmkit import SamplingParams

            return SamplingParams(temperature=0.7, top_k=5)

    params = sampling_params(
        Defaults(), {"temperature": 0.0, "top_k": 0, "stop": [], "ignore_eos": False, "top_p": None}
    )
    assert (params.temperature, params.top_k, params.ignore_eos) == (0, 0, False)
    assert params.stop in (None, ())


def test_generate_answers_and_streams_the_same_text(llmkit):
    flags = ("--temperature", "0", "--max-tokens", "12", FRANCE)
    code, out, _ = llmkit("generate", *flags)
    assert code == 0
    assert out.startswith(" Paris.")
    assert llmkit("generate", "--stream", *flags)[:2] == (0, out)


def test_one_answer_comes_as_a_stream_in_a_terminal(llmkit, monkeypatch):
    from llmkit import LLM

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    streams = []
    real = LLM.stream
    monkeypatch.setattr(LLM, "stream", lambda *args, **kwargs: streams.append(1) or real(*args, **kwargs))
    flags = ("--temperature", "0", "--max-tokens", "3", FRANCE)
    texts = [llmkit("generate", *more, *flags)[1] for more in ((), ("--no-stream",))]
    assert texts[0] == texts[1]
    assert len(streams) == 1


def test_prompts_from_a_file_as_json(llmkit, tmp_path):
    file = tmp_path / "prompts.jsonl"
    first = {"prompt": FRANCE, "user": "a", "priority": 1}
    file.write_text(json.dumps(first) + "\n" + json.dumps("One, two,") + "\n", encoding="utf-8")
    flags = ("--temperature", "0", "--max-tokens", "3", "--json", "--scheduler", "fair", "--attention", "torch")
    code, out, _ = llmkit("generate", "--prompts-file", str(file), *flags)
    assert code == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["prompt"] for line in lines] == [FRANCE, "One, two,"]
    assert lines[0]["outputs"][0]["token_ids"] == [7042, 30, 198]
    assert lines[0]["outputs"][0]["finish_reason"] == "length"


def test_chat_holds_a_conversation(llmkit, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 2+2? Answer with one number.\n/reset\n\n/exit\nnot read\n"))
    code, out, _ = llmkit("chat", "--temperature", "0", "--max-tokens", "8")
    assert code == 0
    assert out == "The answer is 4.\n"


@pytest.mark.parametrize(("level", "told"), [("warning", 1), ("error", 0)])
def test_a_start_that_compiles_says_so_without_a_terminal(llmkit, monkeypatch, level, told):
    from llmkit.jit import known, runtime

    monkeypatch.setattr(runtime, "loaded", lambda: True)
    monkeypatch.setattr(known, "is_known", lambda _: False)
    monkeypatch.setattr(known, "remember", lambda _: None)
    code, out, err = llmkit("generate", "--temperature", "0", "--max-tokens", "2", "--log-level", level, FRANCE)
    assert (code, out) == (0, " Paris.\n")
    assert err.count("The CPU kernels for this model are being compiled") == told


def test_a_bad_sampling_value_is_a_usage_error(llmkit):
    code, _, err = llmkit("generate", "--top-p", "2", FRANCE)
    assert code == 2
    assert "top_p" in err


def test_a_setting_that_the_model_forbids_is_a_usage_error(llmkit):
    code, _, err = llmkit("generate", "--max-model-len", "9000", FRANCE)
    assert code == 2
    assert "8192" in err
