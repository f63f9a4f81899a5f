"""The cases from the field that concern the HTTP server, with the real model over a loopback port."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

G1 = "The English alphabet: A B C D E F G"
G1_TEXT = " H I K L P Q R S T U V Z"
G2 = "Counting: one, two, three, four, five,"
G3 = "ha ha ha ha ha ha ha ha"
G4 = [{"role": "user", "content": "What is 2+2? Answer with one number."}]
CHILI = "\N{HOT PEPPER}"
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"

LARGEST_GAP_S = 1.0

pytestmark = pytest.mark.model
deep = pytest.mark.skipif(os.environ.get("LLMKIT_DEEP_TESTS") != "1", reason="LLMKIT_DEEP_TESTS=1 runs it")


@pytest.fixture
def streamed(events):
    """Text, finish reason, usage and all chunks of a streamed answer."""

    def run(call, *arguments, **fields):
        options = {"include_usage": True}
        *chunks, last = events(call(*arguments, stream=True, stream_options=options, **fields))
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in choices)
        return text, choices[-1]["finish_reason"], last["usage"], choices

    return run


def text_of(response):
    choice = response.json()["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_b02_characters_of_several_tokens(live, streamed):
    fields = {"structured_outputs": {"choice": [FAMILY]}}
    text, reason, _, choices = streamed(live.chat, G4, **fields)
    assert (text, reason) == (FAMILY, "stop")
    assert all("\N{REPLACEMENT CHARACTER}" not in (c["delta"].get("content") or "") for c in choices)
    cut = {"structured_outputs": {"choice": [CHILI]}, "max_tokens": 2}
    text, reason, usage, _ = streamed(live.chat, G4, **cut)
    whole = live.chat(G4, **cut).json()
    assert (text, reason, usage["completion_tokens"]) == ("", "length", 2)
    assert whole["choices"][0]["message"]["content"] == ""
    assert (whole["choices"][0]["finish_reason"], whole["usage"]["completion_tokens"]) == ("length", 2)


def test_b06_almost_a_stop_string(live, streamed):
    fields = {"stop": ["L P X", "Z9"], "max_tokens": 12}
    text, reason, usage, choices = streamed(live.complete, G1, **fields)
    assert (text, reason, usage["completion_tokens"]) == (G1_TEXT, "length", 12)
    assert choices[-1]["text"].endswith("Z")


def test_b08_min_tokens_goes_before_stop_strings(live):
    body = live.complete(G2, stop=[","], min_tokens=6, max_tokens=20).json()
    assert (body["choices"][0]["text"], body["usage"]["completion_tokens"]) == (" six, seven, eight", 6)


def test_b10_no_infinity_in_answers(live, parse, events):
    requests = [
        (live.complete, G1, {"allowed_token_ids": [30], "logprobs": 5, "max_tokens": 2}),
        (live.complete, G1, {"top_k": 1, "temperature": 1, "echo": True, "logprobs": 1, "max_tokens": 2}),
        (live.chat, G4, {"logprobs": True, "top_logprobs": 5, "structured_outputs": {"choice": ["yes"]}}),
    ]
    for call, prompt, fields in requests:
        for stream in (False, True):
            response = call(prompt, stream=stream, **fields)
            assert response.status_code == 200
            bodies = events(response) if stream else [parse(response.content)]
            found = [b["choices"][0]["logprobs"] for b in bodies if b["choices"][0].get("logprobs")]
            own = [p for entry in found for p in entry.get("token_logprobs", ())]
            own += [e["logprob"] for entry in found for e in entry.get("content", ())]
            if fields.get("echo"):
                assert own.pop(0) is None  # the first token of the prompt follows nothing
            assert len(own) >= 1
            assert all(p is not None and p > -100 for p in own)


def test_b12_bytes_of_partial_characters(live, events):
    fields = {"structured_outputs": {"choice": [CHILI]}, "logprobs": True, "top_logprobs": 3}
    tokenizer = live.llm.tokenizer
    for stream in (False, True):
        response = live.chat(G4, stream=stream, **fields)
        bodies = events(response) if stream else [response.json()]
        entries = [e for b in bodies for e in (b["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert [entry["bytes"] for entry in entries[:3]] == [[240, 159], [140], [182]]
        assert bytes(b for entry in entries[:3] for b in entry["bytes"]).decode() == CHILI
        assert [239, 191, 189] not in [top["bytes"] for entry in entries for top in entry["top_logprobs"]]
    named = live.chat(G4, return_tokens_as_token_ids=True, **fields).json()["choices"][0]["logprobs"]["content"]
    for entry in (entry for position in named for entry in (position, *position["top_logprobs"])):
        assert bytes(entry["bytes"]) == tokenizer.token_bytes(int(entry["token"].removeprefix("token_id:")))


def test_b14_forms_of_logprobs(live, refusal):
    body = live.chat(G4, logprobs=True).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert all(entry["top_logprobs"] == [] for entry in content)
    for fields in ({"top_logprobs": 2}, *({"logprobs": True, "top_logprobs": k} for k in (60_000, -1))):
        refusal(live.chat(G4, **fields), 400, "top_logprobs")
    logprobs = live.complete(G1, logprobs=0, max_tokens=2).json()["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 2
    assert [list(best) for best in logprobs["top_logprobs"]] == [[" H"], [" I"]]


def test_b22_extreme_temperatures_and_top_k(live):
    assert {text_of(live.complete(G1, temperature=t, max_tokens=12)) for t in (1e-3, 1e-4, 1e-5, 1e-6, 1e-30)} == {
        G1_TEXT
    }
    warm = {"temperature": 1.5, "seed": 3, "max_tokens": 12}
    (text,) = {text_of(live.complete(G1, top_k=k, **warm)) for k in (-1, 0, 49152, 100000)}
    assert text != G1_TEXT


def test_b26_prompts_that_have_no_tokens(live, refusal):
    for prompt in ("", [], [[]], ["", "hi"], "\u0004", "\u0013\u0014"):
        refusal(live.complete(prompt), 400, "prompt")
    refusal(live.chat([]), 400, "messages")
    assert live.chat([{"role": "user", "content": "\u0004"}], max_tokens=1).status_code == 200
    ids = [live.complete(p, return_token_ids=True, max_tokens=2).json()["choices"][0] for p in ("\u0004hi", "hi")]
    assert ids[0]["prompt_token_ids"] == ids[1]["prompt_token_ids"]
    assert text_of(live.complete(G1, bad_words=["\u0004"], max_tokens=12)) == G1_TEXT
    refusal(live.complete(G1, structured_outputs={"choice": ["\U00040000"]}), 400, "structured_outputs")
    assert text_of(live.complete(G1, stop=["\U00040000"], max_tokens=12)) == G1_TEXT


def test_b28_prompts_as_long_as_the_model_takes(live, refusal):
    limit = live.llm.limits.max_model_len
    body = live.complete([30] * (limit - 1), max_tokens=5).json()
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (1, "length")
    message = refusal(live.complete([30] * limit, max_tokens=1), 400, "prompt")
    assert str(limit) in message
    message = refusal(live.complete([30] * (limit + 1), max_tokens=1), 400, "prompt")
    assert str(limit + 1) in message
    assert str(limit) in message
    body = live.complete([30] * (limit + 1), max_tokens=2, truncate_prompt_tokens=10).json()
    assert body["usage"]["prompt_tokens"] == 10


def test_b28_scoring_without_an_answer(live):
    body = live.complete([30] * 64, max_tokens=0, echo=True, logprobs=1).json()
    choice = body["choices"][0]
    assert body["usage"]["completion_tokens"] == 0
    assert len(choice["logprobs"]["tokens"]) == 64
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
    assert choice["text"] == "." * 64
    assert text_of(live.complete("Hello world", max_tokens=0, echo=True)) == "Hello world"


def test_echo_joins_prompt_and_answer(live, streamed):
    body = live.complete(G1, max_tokens=3, echo=True, logprobs=1, prompt_logprobs=1, return_token_ids=True).json()
    choice = body["choices"][0]
    assert choice["text"] == G1 + " H I K"
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == [len("".join(logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    assert choice["prompt_logprobs"][0] is None
    own = [str(token_id) for token_id in choice["prompt_token_ids"]]
    entries = list(zip(own, choice["prompt_logprobs"], strict=True))[1:]
    assert all(entry[token]["rank"] >= 1 and entry[token]["decoded_token"] for token, entry in entries)
    text, *_ = streamed(live.complete, G1, max_tokens=3, echo=True, logprobs=1)
    assert text == choice["text"]


def test_b30_going_on_with_the_final_message(live, refusal):
    words = "The answer is "
    chat = [{"role": "user", "content": words}, {"role": "assistant", "content": words}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    tokens = live.client.post("/tokenize", json={"messages": chat, **fields}).json()["tokens"]
    text = live.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\nThe answer is ")
    assert text.count(words) == 2
    answer = live.chat(chat, max_tokens=3, echo=True, **fields).json()
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    assert answer["choices"][0]["message"]["content"].startswith(words)
    refusal(live.chat(chat, continue_final_message=True, add_generation_prompt=True), 400, "continue_final_message")


def test_b32_templates_that_refuse(live, refusal):
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}x"
    message = refusal(live.chat([{"role": "system", "content": "x"}], chat_template=refuses), 400, "messages")
    assert "System role not supported" in message
    refusal(live.chat(G4, chat_template="{% if %}"), 400, "chat_template")
    for hostile in ("{% for i in range(10**9) %}{% endfor %}", "{{ ''.__class__.__mro__ }}"):
        assert live.chat(G4, chat_template=hostile, max_tokens=1).status_code == 400
    assert live.chat([{"role": "wizard", "content": "x"}], max_tokens=1).status_code == 200


def test_b42_equal_request_ids(live):
    prompts = {G1: " H I K L P", G2: " six, seven, eight", G3: "h ha ha ha ha"}

    def ask(prompt):
        response = live.client.post(
            "/v1/completions",
            json={"prompt": prompt, "temperature": 0, "max_tokens": 5},
            headers={"x-request-id": "same"},
        )
        return prompt, text_of(response)

    with ThreadPoolExecutor(6) as pool:
        for prompt, text in pool.map(ask, [*prompts, *prompts]):
            assert prompts[prompt].startswith(text[:4])
            assert text == prompts[prompt]


def alternatives(depth):
    """Pairs within one another, of which both may hold."""
    if depth == 0:
        return {"minimum": 0}
    return {"oneOf": [{"properties": {name: alternatives(depth - 1)}} for name in "ab"]}


EXPLOSIVE = {
    "alternatives": alternatives(12),
    "pattern": {"type": "string", "pattern": "(a{1,500}){1,500}"},
    "maxLength": {"type": "string", "maxLength": 1_000_000},
    "properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3_000)}},
    "enum": {"enum": [f"value number {i}" for i in range(20_000)]},
}


@pytest.mark.parametrize(
    "name",
    ["alternatives", "pattern", "maxLength", *(pytest.param(name, marks=deep) for name in ("properties", "enum"))],
)
def test_b48_a_stream_goes_on_while_a_schema_is_compiled(live, refusal, name):
    """Whoever asked for it may go away meanwhile; that leaves nothing behind."""
    assert text_of(live.chat(G4, structured_outputs={"choice": ["yes"]})) == "yes"  # the compile process is there

    def ask():
        body = {"messages": G4, "structured_outputs": {"json": EXPLOSIVE[name]}, "max_tokens": 3}
        try:
            return live.client.post("/v1/chat/completions", json=body, timeout=2.0)
        except httpx.ReadTimeout:
            return None

    body = {"prompt": G1, "max_tokens": 900, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(1) as pool, live.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        asked = pool.submit(ask)
        gaps, last = [], time.perf_counter()
        while not asked.done():
            next(lines)
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()
    answer = asked.result()
    if answer is not None and answer.status_code != 200:
        refusal(answer, 400, "structured_outputs")
    assert name != "alternatives" or answer is None or answer.status_code == 400
    assert max(gaps, default=0.0) < LARGEST_GAP_S
    assert text_of(live.chat(G4)) == "The answer is 4."


def test_b50_schemas_are_met_or_refused(live, refusal):
    jsonschema = pytest.importorskip("jsonschema")
    schemas = [
        {
            "type": "object",
            "required": ["a"],
            "maxProperties": 2,
            "additionalProperties": {"type": "integer", "maximum": 9},
        },
        {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
        {"type": "string", "pattern": "^[ab]+$", "maxLength": 3},
        {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 2, "maxItems": 3},
        {"not": {"type": "string"}, "enum": [1, "a", 2]},
    ]
    for schema in schemas:
        response = live.chat(G4, structured_outputs={"json": schema}, max_tokens=60)
        if response.status_code == 400:
            refusal(response, 400, "structured_outputs")
            continue
        assert response.json()["choices"][0]["finish_reason"] == "stop", schema
        jsonschema.validate(json.loads(text_of(response)), schema)


def test_b52_blanks_are_bounded(live):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["n"]}
    bias = {"198": 100, "216": 100}
    response = live.chat(G4, structured_outputs={"json": schema}, logit_bias=bias, max_tokens=200)
    assert response.json()["choices"][0]["finish_reason"] == "stop"
    assert 0 <= json.loads(text_of(response))["n"] <= 9


def test_b54_stop_tokens_inside_json(live):
    properties = {"name": {"type": "string", "maxLength": 12}}
    schema = {"type": "object", "properties": properties, "required": ["name"], "additionalProperties": False}
    fields = {"logit_bias": {"2": 100, "0": 100}, "stop_token_ids": [30], "max_tokens": 60}
    for more in ({}, {"ignore_eos": True}):
        response = live.chat(G4, structured_outputs={"json": schema}, **fields, **more)
        assert len(json.loads(text_of(response))["name"]) <= 12
        assert text_of(response).endswith("}")


def test_b56_response_format(live, refusal):
    assert text_of(live.chat(G4, response_format={"type": "text"})) == "The answer is 4."
    for value in (
        {"type": "json_schema", "schema": {"type": "object"}},
        {"type": "json_schema"},
        {"type": "xml"},
        "json",
        {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"minimum": 5, "maximum": 1, "type": "integer"}},
        },
    ):
        refusal(live.chat(G4, response_format=value), 400, "response_format")
    both = {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}
    assert live.chat(G4, **both).status_code == 400
    for limit in (20_000_000_000, 1e30):
        schema = {"type": "integer", "minimum": 0, "maximum": limit}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        response = live.chat(G4, response_format=form, max_tokens=40)
        assert response.status_code == 400 or 0 <= json.loads(text_of(response)) <= limit


def test_the_older_guided_fields(live):
    assert text_of(live.chat(G4, guided_choice=["yes", "no"])) in ("yes", "no")
    assert text_of(live.complete(G1, guided_regex="[0-9]{3}")).isdigit()
    assert isinstance(json.loads(text_of(live.chat(G4, guided_json={"type": "boolean"}))), bool)


def test_b62_the_reference_answer_after_bad_requests(live):
    for data in (b"{", b"", b"\xff", b'{"messages": 5}', b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'):
        response = live.client.post("/v1/chat/completions", content=data, headers={"content-type": "application/json"})
        assert response.status_code == 400
    assert live.client.get("/health").status_code == 200
    assert text_of(live.chat(G4)) == "The answer is 4."


def test_b64_model_names(live, refusal):
    cards = live.client.get("/v1/models").json()
    assert [(card["id"], card["object"]) for card in cards["data"]] == [("smol", "model"), ("alias", "model")]
    assert cards["data"][0]["max_model_len"] == 1024
    assert live.client.get("/v1/models/alias").json()["id"] == "alias"
    refusal(live.client.get("/v1/models/none"), 404, "model")
    for name, answered in (("smol", "smol"), ("alias", "alias"), (None, "smol")):
        assert live.complete(G1, model=name, max_tokens=1).json()["model"] == answered
    for name in (cards["data"][0]["root"], "SMOL", ""):
        refusal(live.complete(G1, model=name), 404, "model")


def test_b66_cached_tokens(live, streamed):
    prompt = [(7919 * i + 13) % 40_000 + 300 for i in range(70)]
    assert live.client.post("/reset_prefix_cache").status_code == 200
    first = live.complete(prompt, max_tokens=1).json()["usage"]
    second = live.complete(prompt, max_tokens=1).json()["usage"]
    _, _, third, _ = streamed(live.complete, prompt, max_tokens=1)
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == third["prompt_tokens_details"] == {"cached_tokens": 64}


def test_b16_answers_differ_and_repeat_by_their_seed(live):
    fields = {"n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 12}
    runs = [[c["text"] for c in live.complete(G3, **fields).json()["choices"]] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 1


def test_many_streams_at_once(live, streamed):
    """Every one gets its own answer, whole."""
    expected = {G1: G1_TEXT, G3: "h ha ha ha ha ha ha ha ha ha ha ha"}

    def ask(prompt):
        return prompt, streamed(live.complete, prompt, max_tokens=12)[0]

    with ThreadPoolExecutor(16) as pool:
        for prompt, text in pool.map(ask, [G1, G3] * 8):
            assert text == expected[prompt]


def test_clients_that_leave_in_the_middle(live):
    """The engine forgets them: checked after the test, as after every one."""
    for _ in range(4):
        body = {"prompt": G3, "max_tokens": 900, "stream": True, "ignore_eos": True}
        with live.client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
