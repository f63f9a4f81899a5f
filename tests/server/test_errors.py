"""Whatever is wrong with a request: one form of error, the right status, the field's name; never a 500."""

from __future__ import annotations

import gzip
import json

import pytest

from llmkit.engine.async_client import EngineHealth

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"",
        b"[1]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
        b'{"prompt": NaN}',
        b'{"temperature": Infinity, "prompt": "a"}',
        b'{"temperature": 1e999, "prompt": "a"}',
        b'{"max_tokens": ' + b"9" * 10_000 + b', "prompt": "a"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"a":' * 200 + b"1" + b"}" * 200,
    ],
    ids=lambda data: repr(data[:32]),
)
def test_bodies_that_are_no_json_object(served, refusal, path, data):
    """B62."""
    message = refusal(served.call("POST", path, content=data, headers=JSON), 400, None)
    assert "body" in message
    assert "sys." not in message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": 5}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": MESSAGES * 5000}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
        ({"tools": 3}, "tools"),
        ({"tools": [3]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(300)]}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"structured_outputs": 1}, "structured_outputs"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 16384}, "n"),
        ({"n": 10**30}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a" + str(i) for i in range(300)]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(70_000)}}, "logit_bias"),
        ({"logit_bias": {"1": 200}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 60_000}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": "two"}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"stream": True, "stream_options": 3}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"priority": "high"}, "priority"),
        ({"request_id": "two\nlines"}, "request_id"),
        ({"request_id": "x" * 10_000}, "request_id"),
        ({"request_id": 7}, "request_id"),
        ({"user": 7}, "user"),
        ({"user": "u" * 5000}, "user"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"kv_transfer_params": 1}, "kv_transfer_params"),
        ({"kv_transfer_params": {"a": [10**30]}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"a": -(10**30)}}, "kv_transfer_params"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template": "{% if"}, "chat_template"),
        ({"chat_template": 5}, "chat_template"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
        ({"documents": 5}, "documents"),
        ({"documents": ["a"]}, "documents"),
        ({"model": 5}, "model"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ],
    ids=lambda value: json.dumps(value)[:48] if isinstance(value, dict) else value,
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_fields_of_a_chat_are_named_before_a_stream_begins(served, refusal, fields, param, stream):
    """B62; B58: stream_options without a stream."""
    body = {"messages": MESSAGES, **({"stream": True} if stream and "stream" not in fields else {}), **fields}
    if stream and fields == {"stream_options": {}}:
        body["stream"] = False
    refusal(served.post(CHAT, body), 400, param)
    assert served.llm.num_unfinished == 0
    assert served.context.admission.num_sequences == 0


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ({"prompt": None}, "prompt", 400),
        ({"prompt": ""}, "prompt", 400),
        ({"prompt": []}, "prompt", 400),
        ({"prompt": [[]]}, "prompt", 400),
        ({"prompt": ["", "hi"]}, "prompt", 400),
        ({"prompt": ["hi", ""]}, "prompt", 400),
        ({"prompt": ["hi", 3]}, "prompt", 400),
        ({"prompt": [1, "hi"]}, "prompt", 400),
        ({"prompt": [True]}, "prompt", 400),
        ({"prompt": [10**6]}, "prompt", 400),
        ({"prompt": [-1]}, "prompt", 400),
        ({"prompt": [[1, 10**6]]}, "prompt", 400),
        ({"prompt": {"a": 1}}, "prompt", 400),
        ({"prompt": ["a"] * 3000}, "prompt", 400),
        ({"prompt": [1] * 600}, "prompt", 400),
        ({"prompt": "a" * 40_000}, "prompt", 400),
        ({"logprobs": True}, "logprobs", 400),
        ({"logprobs": 21}, "logprobs", 400),
        ({"echo": True, "logprobs": "5"}, "logprobs", 400),
        ({"echo": 1}, "echo", 400),
        ({"suffix": "end"}, "suffix", 501),
        ({"best_of": 3}, "best_of", 501),
    ],
    ids=lambda value: json.dumps(value)[:48] if isinstance(value, dict) else str(value),
)
def test_bad_fields_of_a_completion(served, refusal, fields, param, status):
    refusal(served.post("/v1/completions", {"prompt": "hi", **fields}), status, param)
    assert served.llm.num_unfinished == 0
    assert served.context.admission.num_sequences == 0


def test_a_prompt_is_missing(served, refusal):
    refusal(served.post("/v1/completions", {}), 400, "prompt")
    refusal(served.post(CHAT, {}), 400, "messages")


def test_the_message_of_a_batch_says_which_prompt(served, refusal):
    assert "prompt[1]" in refusal(served.complete(["hi", ""]), 400, "prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"function_call": "auto"}, "function_call"),
    ],
)
def test_what_is_not_supported_is_501(served, refusal, fields, param):
    refusal(served.chat(**fields), 501, param)


@pytest.mark.parametrize(
    ("num_prompts", "n", "param"), [(2048, None, "prompt"), (1029, 2, "prompt"), (600, 2, "n"), (1028, None, None)]
)
def test_more_answers_than_are_ever_taken(served, refusal, num_prompts, n, param):
    """The field that asks for them is named: 4 run and 1024 may wait."""
    fields = {} if n is None else {"n": n}
    response = served.complete(["a"] * num_prompts, max_tokens=1, **fields)
    if param is None:
        assert response.status_code == 200
    else:
        assert "takes 1028 at a time (max_num_seqs and max_queue" in refusal(response, 400, param)


@pytest.mark.parametrize("path", ["/health", "/ping", "/version", "/load"])
def test_probes_with_head(served, path):
    assert served.call("HEAD", path).status_code == 200
    served.context.draining = True
    assert served.call("HEAD", path).status_code == served.call("GET", path).status_code


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ('{"prompt": "a"}'.encode("utf-16"), "it is not UTF-8 at byte 0"),
        (b'{"prompt": "\xff"}', "it is not UTF-8 at byte 12"),
        (b'\xef\xbb\xbf{"prompt": "a"}', "it begins with a byte-order mark"),
        (b'{"prompt": NaN}', "it holds NaN, Infinity or half of a surrogate pair"),
    ],
)
def test_what_is_wrong_with_a_body_is_told(served, refusal, data, words):
    message = refusal(served.call("POST", "/v1/completions", content=data, headers=JSON), 400, None)
    assert message == f"The body is not valid JSON: {words}."


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "Identity"])
def test_bodies_must_not_be_compressed(served, refusal, encoding):
    data = gzip.compress(b'{"prompt": "hi"}') if encoding == "gzip" else b'{"prompt": "hi"}'
    response = served.call("POST", "/v1/completions", content=data, headers={**JSON, "content-encoding": encoding})
    if encoding == "Identity":
        assert response.status_code == 200
    else:
        assert "no Content-Encoding but identity" in refusal(response, 415, None)


def test_a_chat_too_long_for_its_template_is_told_its_length(served, refusal):
    text = "a" * 31_999_990
    words = "characters; the longest sequence of 512 tokens (max_model_len) holds at most 3584."
    assert words in refusal(served.chat(text), 400, "messages")
    assert "puts out more than" in refusal(served.chat(text, truncate_prompt_tokens=5), 400, "messages")


@pytest.mark.parametrize("source", ["(", "a)", "[a", "a{2,1}", "*", "\\", "[b-a]"])
def test_what_is_no_regular_expression(served, refusal, source):
    message = refusal(served.complete(guided_regex=source), 400, "guided_regex")
    assert message.startswith("guided_regex: regex is not a regular expression: ")
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": source}}}
    message = refusal(served.complete(guided_json=schema), 400, "guided_json")
    assert "pattern is not a regular expression: " in message


def test_a_regular_expression_beyond_all_engines(served, refusal):
    message = refusal(served.complete(guided_regex=r"(a)\1"), 400, "guided_regex")
    assert "no grammar engine can express" in message


@pytest.mark.parametrize("max_tokens", [-1, 0])
def test_the_least_max_tokens(served, refusal, max_tokens):
    message = refusal(served.complete(max_tokens=max_tokens), 400, "max_tokens")
    assert "an integer from 1 to 2147483647 (0 only with prompt_logprobs" in message


def test_lengths_are_told_plainly(served, refusal):
    message = refusal(served.complete([30] * 513), 400, "prompt")
    assert "513" in message
    assert "512" in message
    assert "-" not in message
    message = refusal(served.complete([30] * 512, max_tokens=1), 400, "prompt")
    assert "512" in message
    assert "at least 1" in message


def test_unknown_endpoints_and_methods(served, refusal):
    """B62."""
    refusal(served.call("GET", "/nope"), 404, None)
    refusal(served.call("GET", "/v1/completions"), 405, None)
    refusal(served.call("DELETE", "/health"), 405, None)
    refusal(served.call("POST", "/v1/chat/completions/"), 404, None)


@pytest.mark.parametrize("name", ["none", "a%2Fb", "%0A", "a%0Ab", "scripted%0A", "%E2%80%A8", "%00"])
def test_a_model_of_any_name_is_answered_by_its_route(served, refusal, name):
    """The error names what is to blame, also where a name has line ends, which path patterns stop at."""
    refusal(served.call("GET", f"/v1/models/{name}"), 404, "model")


def test_bodies_must_be_declared_as_json(served, refusal):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"content-type": kind}
        refusal(served.call("POST", CHAT, content=json.dumps({"messages": MESSAGES}), headers=headers), 415, None)
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = served.call("POST", CHAT, content=json.dumps({"messages": MESSAGES}), headers=headers)
    assert response.status_code == 200


def test_unknown_fields_are_accepted_and_named(served, caplog):
    """B62."""
    response = served.chat(foo=1, zap={"a": 2}, **{"b\nad": 1})
    assert response.status_code == 200
    assert response.headers["x-llmkit-unknown-fields"] == "b?ad, foo, zap"
    assert "b?ad, foo, zap" in caplog.text
    many = served.chat(**{f"field{i}": 1 for i in range(100)}).headers["x-llmkit-unknown-fields"]
    assert many.endswith("and 84 more")
    assert "x-llmkit-unknown-fields" not in served.chat().headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_engine_names_the_clients_field(served, refusal, stream):
    served.engine.refuse = ("structured_outputs cannot be met.", "structured_outputs")
    message = refusal(served.chat(stream=stream), 400, "structured_outputs")
    assert message == "structured_outputs cannot be met."
    served.engine.refuse = ("the engine gives up.", None)
    refusal(served.chat(stream=stream), 500, None)
    assert served.context.admission.num_sequences == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
def test_who_waited_in_vain_may_come_again(served, refusal, stream, prompt):
    served.engine.refuse, served.engine.overloaded = ("there was no room.", None), True
    response = served.complete(prompt=prompt, stream=stream)
    assert refusal(response, 503, None) == "there was no room."
    assert response.headers["retry-after"] == "1"
    assert served.context.admission.num_sequences == 0


def test_an_answer_that_breaks(served, refusal):
    served.engine.fail_after = 2
    assert refusal(served.complete(), 500, None) == "the step broke"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_an_answer_that_breaks_in_the_middle_of_a_stream(served, events, path):
    served.engine.fail_after = 2
    body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": MESSAGES}
    response = served.post(path, body | {"stream": True})
    assert response.status_code == 200
    *chunks, last = events(response)
    assert all("error" not in chunk for chunk in chunks)
    assert last == {"error": {"message": "the step broke", "type": "InternalServerError", "param": None, "code": 500}}
    text = "".join(c["choices"][0].get("text") or c["choices"][0].get("delta", {}).get("content", "") for c in chunks)
    assert text == "He"
    assert served.context.admission.num_sequences == 0


@pytest.mark.parametrize(
    ("health", "words"),
    [
        (EngineHealth(alive=False, ready=False, error="it was killed"), "it was killed"),
        (EngineHealth(alive=True, ready=False), "started again"),
    ],
)
def test_without_an_engine_requests_and_health_are_503(served, refusal, health, words):
    served.engine.health = health
    for response in (served.call("GET", "/health"), served.call("GET", "/ping"), served.chat(), served.complete()):
        assert words in refusal(response, 503, None)
        assert response.headers["retry-after"] == "1"


def test_health_tells_stuck_from_busy(served, refusal):
    served.engine.health = EngineHealth(alive=True, ready=True, stuck_s=59.0)
    assert served.call("GET", "/health").status_code == 200
    served.engine.health = EngineHealth(alive=True, ready=True, stuck_s=61.0)
    assert "stuck" in refusal(served.call("GET", "/health"), 503, None)


def test_a_draining_server_takes_nothing(served, refusal):
    served.context.draining = True
    for response in (served.chat(), served.call("GET", "/health")):
        assert "shutting down" in refusal(response, 503, None)


def test_a_fault_of_ours_is_a_500_without_details(served, refusal, monkeypatch, caplog):
    def broken(*_args, **_kwargs):
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(served.llm, "submit", broken)
    response = served.chat()
    assert "secret" not in refusal(response, 500, None)
    assert response.headers["x-request-id"]
    assert "secret detail" in caplog.text
    assert served.context.admission.num_sequences == 0
