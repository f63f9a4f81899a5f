"""Requests that wait, are given up, or come when there is no room."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from llmkit.frontend.chat_template import ChatTemplate
from llmkit_server.text_threads import NUM_THREADS

CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def test_the_queue_is_bounded(serve, refusal):
    served = serve(max_queue=2)  # four run, two wait
    served.engine.hold = True

    async def use(client):
        waiting = [asyncio.create_task(client.post(CHAT, json=CHAT_BODY | {"n": 2})) for _ in range(3)]
        while served.llm.num_unfinished < 3:
            await asyncio.sleep(0)
        load = (await client.get("/load")).json()
        refused = [await client.post(CHAT, json=CHAT_BODY | {"stream": stream}) for stream in (False, True)]
        too_large = await client.post(CHAT, json=CHAT_BODY | {"n": 7})
        served.engine.hold = False
        served.engine._changed.set()
        answers = await asyncio.gather(*waiting)
        after = await client.post(CHAT, json=CHAT_BODY)
        return load, refused, too_large, [*answers, after]

    load, refused, too_large, answers = served.run(use)
    assert load == {"server_load": 3}
    for response in refused:
        refusal(response, 429, None)
        assert response.headers["retry-after"] == "1"
    refusal(too_large, 400, "n")
    assert [answer.status_code for answer in answers] == [200] * 4
    assert served.context.admission.num_sequences == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_client_that_goes_away_aborts_its_request(served, stream, hold, path):
    """While the request waits for the engine, and in the middle of the answer."""
    served.engine.hold = hold
    served.engine.answers = ["x" * 300]
    body = (CHAT_BODY if path == CHAT else {"prompt": ["a", "b"]}) | {"stream": stream, "max_tokens": 250}

    async def gone():
        while not served.engine.added or (not hold and served.llm.num_unfinished == 0):
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)

    served.asgi("POST", path, body, gone=gone)
    assert sorted(served.engine.aborted) == sorted(request.request_id for request in served.engine.added)
    assert served.llm.num_unfinished == 0
    assert served.context.admission.num_sequences == 0


def test_a_request_that_takes_too_long_is_ended(serve, refusal):
    served = serve(request_timeout_s=0.05)
    served.engine.hold = True
    for stream in (False, True):
        assert "0.05 s" in refusal(served.chat(stream=stream), 504, None)
    assert served.llm.num_unfinished == 0
    assert len(served.engine.aborted) == 2


def test_a_body_that_does_not_come(served, refusal, monkeypatch):
    monkeypatch.setattr("llmkit_server.body.BODY_TIMEOUT_S", 0.05)

    async def stalled():
        yield b'{"mess'
        await asyncio.sleep(60)

    async def use(client):
        return await client.post(CHAT, content=stalled(), headers={"content-type": "application/json"})

    refusal(served.run(use), 408, None)


def test_a_slow_reader_holds_up_nobody(served):
    """While one client does not read, another one's answer is complete; then the first one gets all of its own."""
    served.engine.answers = ["slow and steady" * 10]
    pieces = []

    async def use(client):
        stops, goes_on = asyncio.Event(), asyncio.Event()

        async def send(message):
            if message["type"] == "http.response.body" and message["body"]:
                pieces.append(message["body"])
                if len(pieces) == 2:
                    stops.set()
                    await goes_on.wait()

        slow = asyncio.create_task(
            served.asgi_call("POST", CHAT, CHAT_BODY | {"stream": True, "max_tokens": 200}, send)
        )
        await stops.wait()
        quick = await client.post(CHAT, json=CHAT_BODY | {"max_tokens": 200})
        assert not slow.done()
        goes_on.set()
        await slow
        return quick

    assert served.run(use).json()["choices"][0]["message"]["content"] == "slow and steady" * 10
    assert len(pieces) < 20  # what was missed came in few, long pieces


def test_two_hundred_ids_used_again_at_once(served):
    """An abort never hits the next request of the same name."""
    served.engine.answers = ["x" * 50]

    async def use(client):
        for _ in range(200):
            gone = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "request_id": "X"}))
            while not served.llm.num_unfinished:
                await asyncio.sleep(0)
            gone.cancel()
            again = await client.post("/v1/completions", json={"prompt": "a", "request_id": "X", "max_tokens": 4})
            assert again.json()["choices"][0]["text"] == "xxxx"
            await asyncio.gather(gone, return_exceptions=True)

    served.run(use)
    assert served.llm.num_unfinished == 0
    assert served.context.admission.num_sequences == 0


@pytest.mark.parametrize("prompts", [["x" * 40_000], ["x" * 100] * 400])
def test_much_text_is_tokenised_beside_the_event_loop(served, monkeypatch, prompts):
    threads = set()
    encode = served.llm.tokenizer.encode

    def recorded(text, **more):
        if text in prompts:
            threads.add(threading.current_thread())
        return encode(text, **more)

    monkeypatch.setattr(served.llm.tokenizer, "encode", recorded)
    fields = {"max_tokens": 1, "truncate_prompt_tokens": 8}
    assert served.complete(prompts, **fields).status_code == 200
    assert threads
    assert threading.main_thread() not in threads


def test_a_template_of_the_request_is_compiled_beside_the_event_loop(served, monkeypatch):
    threads = []
    compile_template = ChatTemplate.compile

    def recorded(template):
        threads.append(threading.current_thread())
        return compile_template(template)

    monkeypatch.setattr(ChatTemplate, "compile", recorded)
    assert served.chat(chat_template="{{ messages[0].content }}").status_code == 200
    assert threads
    assert threading.main_thread() not in threads


def test_what_stands_behind_a_prompt_that_is_too_long_is_not_looked_at(served, refusal, monkeypatch):
    encoded = []
    encode = served.llm.tokenizer.encode

    def recorded(text, **more):
        if text in prompts:
            encoded.append(len(text))
        return encode(text, **more)

    monkeypatch.setattr(served.llm.tokenizer, "encode", recorded)
    prompts = ["x", *["x" * 3_000] * 12]
    assert refusal(served.complete(prompts), 400, "prompt").startswith("prompt[1]: the prompt has 3000 tokens")
    assert encoded == [1, 3_000]
    assert served.context.admission.num_sequences == 0


@pytest.mark.parametrize(("path", "param"), [("/v1/completions", "prompt"), (CHAT, "messages")])
def test_a_text_that_no_tokens_could_hold_is_not_tokenised(served, refusal, monkeypatch, path, param):
    """Megabytes of it would take seconds and gigabytes only to be refused."""
    encoded = []
    monkeypatch.setattr(served.llm.tokenizer, "encode", lambda text, **_: encoded.append(text) or [1])
    text = "x" * 4_000_000
    body = {"prompt": text} if path != CHAT else {"messages": [{"role": "user", "content": text}]}
    assert "characters; the longest sequence of 512 tokens" in refusal(served.post(path, body), 400, param)
    assert encoded == []


def test_few_long_texts_are_tokenised_at_a_time(served, monkeypatch):
    threads = set()

    def slow(text, **_):
        if len(text) == 40_000:
            threads.add(threading.current_thread().name)
            time.sleep(0.02)
        return [1]

    async def use(client):
        monkeypatch.setattr(served.llm.tokenizer, "encode", slow)
        bodies = [{"prompt": "x" * 40_000, "max_tokens": 1, "truncate_prompt_tokens": 8}] * 12
        return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    assert [answer.status_code for answer in served.run(use)] == [200] * 12
    assert len(threads) == NUM_THREADS
    assert all(name.startswith("llmkit-text") for name in threads)


def test_many_prompts_are_submitted_in_turns(served, monkeypatch):
    """Others are answered before the last of them is handed over."""
    prepare = served.llm.input_processor.prepare
    seen = []

    def slow(*given, **more):
        time.sleep(0.01)
        return prepare(*given, **more)

    monkeypatch.setattr(served.llm.input_processor, "prepare", slow)

    async def use(client):
        many = asyncio.create_task(client.post("/v1/completions", json={"prompt": [[1]] * 100, "max_tokens": 1}))
        while not served.engine.added:
            await asyncio.sleep(0)
        assert (await client.get("/health")).status_code == 200
        seen.append(len(served.engine.added))
        return await many

    assert len(served.run(use).json()["choices"]) == 100
    assert seen[0] < 90
