"""Chunks of streams: order, roles, ids, usage, several answers and prompts."""

from __future__ import annotations

import pytest

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def body_of(path, **fields):
    start = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    return start | fields


def news(chunk):
    return [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in chunk["choices"]]


@pytest.mark.parametrize("n", [1, 2])
def test_chunks_of_a_chat(served, events, n):
    """B60."""
    served.engine.answers = ["Hello", "Good day"]
    chunks = events(served.chat(n=n, stream=True))
    assert len({(c["id"], c["created"], c["model"], c["object"], c["system_fingerprint"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert chunks[0]["id"].startswith("chatcmpl-")
    for index in range(n):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1]["delta"] == {}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == served.engine.answers[index]


def test_chunks_join_up_to_the_whole_answer(served, events):
    served.engine.answers = ["Héllo wörld 日本 true"]
    chunks = events(served.complete(stream=True, max_tokens=64))
    whole = served.complete(max_tokens=64).json()["choices"][0]
    assert "".join(news(c)[0] for c in chunks) == whole["text"] == served.engine.answers[0]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"
    assert all("\N{REPLACEMENT CHARACTER}" not in news(c)[0] for c in chunks)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"continuous_usage_stats": True}])
def test_no_usage_unless_it_is_asked_for(served, events, path, n, options):
    """B58."""
    chunks = events(served.post(path, body_of(path, n=n, stream=True, stream_options=options)))
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("continuous", [False, True])
def test_usage_when_it_is_asked_for(served, events, path, n, continuous):
    """B58."""
    served.engine.answers = ["Hello", "no"]
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    *chunks, last = events(served.post(path, body_of(path, n=n, stream=True, stream_options=options)))
    assert last["choices"] == []
    assert last["usage"] == served.post(path, body_of(path, n=n)).json()["usage"]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert last["usage"]["completion_tokens"] == 6 + (2 if n == 2 else 0)
    counts = [chunk["usage"] for chunk in chunks]
    if continuous:
        numbers = [usage["completion_tokens"] for usage in counts]
        assert numbers == sorted(numbers)
        assert numbers[-1] == last["usage"]["completion_tokens"]
    else:
        assert counts == [None] * len(chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_numbered_prompt_by_prompt(served, events, stream):
    served.engine.answers = ["Hello", "no"]
    response = served.complete(["one", "three"], n=2, echo=True, stream=stream)
    if stream:
        texts = dict.fromkeys(range(4), "")
        for chunk in events(response):
            texts[chunk["choices"][0]["index"]] += news(chunk)[0]
    else:
        texts = {choice["index"]: choice["text"] for choice in response.json()["choices"]}
        assert response.json()["usage"]["prompt_tokens"] == 8
    assert texts == {0: "oneHello", 1: "oneno", 2: "threeHello", 3: "threeno"}


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_on_demand(served, events, stream):
    def joined(response):
        if not stream:
            choice = response["choices"][0]
            return choice["token_ids"], choice.get("prompt_token_ids") or response.get("prompt_token_ids")
        choices = [c["choices"][0] for c in response]
        ids = [i for choice in choices for i in choice.get("token_ids", ())]
        return ids, next(
            (c["choices"][0].get("prompt_token_ids") or c.get("prompt_token_ids"))
            for c in response
            if "prompt_token_ids" in c or "prompt_token_ids" in c["choices"][0]
        )

    expected = [*b"Hello", served.llm.tokenizer.eos_token_id]
    for path in (COMPLETIONS, CHAT):
        response = served.post(path, body_of(path, return_token_ids=True, stream=stream))
        ids, prompt_ids = joined(events(response) if stream else response.json())
        assert ids == expected
        assert bytes(prompt_ids).decode() == ("hi" if path == COMPLETIONS else "[user]hi[assistant]")
        plain = served.post(path, body_of(path)).text
        assert "token_ids" not in plain


def test_several_tokens_may_arrive_in_one_chunk(served, events):
    """A reader that is slower than the engine gets longer pieces, and loses nothing."""
    served.engine.answers = ["abcdefgh" * 20]
    chunks = events(served.chat(stream=True, logprobs=True, max_tokens=400))
    choices = [c["choices"][0] for c in chunks]
    tokens = [entry for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == "abcdefgh" * 20
    assert "".join(entry["token"] for entry in tokens[:-1]) == text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_event_is_sent_in_one_piece(served, path):
    """Clients read lines, but proxies and counters see writes: one for each event."""
    sent = []

    async def send(message):
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    served.asgi("POST", path, body_of(path, stream=True), send=send)
    assert sent.pop() == b""
    assert all(piece.startswith(b"data: ") and piece.endswith(b"\n\n") for piece in sent)
    assert all(piece.count(b"data: ") == 1 for piece in sent)
    assert sent[-1] == b"data: [DONE]\n\n"


def test_logprobs_hold_no_infinity_and_leave_out_the_impossible(served, parse, events):
    for stream in (False, True):
        response = served.complete(logprobs=2, max_tokens=2, stream=stream)
        bodies = events(response) if stream else [parse(response.content)]
        for body in bodies:
            logprobs = body["choices"][0]["logprobs"]
            assert logprobs["token_logprobs"] == [-0.5] * len(logprobs["tokens"])
            assert all(set(best.values()) == {-0.5, -1.0} for best in logprobs["top_logprobs"])
        response = served.chat(logprobs=True, top_logprobs=2, max_tokens=2, stream=stream)
        bodies = events(response) if stream else [parse(response.content)]
        entries = [e for b in bodies for e in (b["choices"][0]["logprobs"] or {"content": []})["content"]]
        assert [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries] == [[-1.0]] * 2


def test_tokens_can_be_written_as_ids(served):
    body = served.complete(logprobs=1, max_tokens=2, return_tokens_as_token_ids=True).json()
    assert body["choices"][0]["logprobs"]["tokens"] == ["token_id:72", "token_id:101"]
    body = served.chat(logprobs=True, max_tokens=2, return_tokens_as_token_ids=True).json()
    first = body["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"], first["top_logprobs"]) == ("token_id:72", [72], [])


def test_offsets_count_characters_not_bytes(served):
    served.engine.answers = ["é日本x🌶"]
    choice = served.complete("äö", echo=False, logprobs=0).json()["choices"][0]
    text, logprobs = choice["text"], choice["logprobs"]
    pieces = ["é", "日本", "x", "\\xf0", "\\x9f", "\\x8c", "\\xb6"]
    assert text == "é日本x🌶"
    assert logprobs["tokens"][:3] == pieces[:3]
    assert logprobs["tokens"][3:7] == [f"bytes:{piece}" for piece in pieces[3:]]
    assert logprobs["text_offset"] == [0, 1, 3, 4, 4, 4, 4, 5]
