"""Keys, rates, sizes, ids, other origins, and middleware of the operator's own."""

from __future__ import annotations

import asyncio
import hmac
import json
import textwrap

import pytest

from llmkit.errors import ConfigError, InvalidRequestError
from llmkit_server.admission import Admission, RateLimiter
from llmkit_server.errors import ApiError
from llmkit_server.limits import MAX_CLIENTS

CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic one"},
        {"authorization": "one"},
        {"x-api-key": "wrong"},
        {"x-api-key": ""},
    ],
)
def test_without_a_key_the_api_is_closed(serve, refusal, headers):
    served = serve(api_keys=("one", "zwei-ö"), enable_control_endpoints=True)
    paths = [
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/none"),
        ("POST", "/sleep"),
    ]
    for method, path in [*paths, ("GET", "/server_info"), ("POST", "/v2/rerank"), ("POST", "/inference/v1/generate")]:
        response = served.call(method, path, headers=headers, content=b"{" if method == "POST" else None)
        refusal(response, 401, None)
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/version", "/load", "/openapi.json"):
        assert served.call("GET", path, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer one"},
        {"authorization": "bearer  one"},
        {"authorization": "Bearer zwei-ö".encode()},
        {"x-api-key": "one"},
    ],
)
def test_with_a_key_it_is_open(serve, headers):
    served = serve(api_keys=("one", "zwei-ö"))
    assert served.call("GET", "/v1/models", headers=headers).status_code == 200


def test_every_key_is_compared_in_constant_time(serve, monkeypatch):
    compared = []

    def compare(one, other):
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    served = serve(api_keys=("a", "much longer", "third"))
    assert served.call("GET", "/v1/models", headers={"x-api-key": "a"}).status_code == 200
    assert compared == [(32, 32)] * 3


def test_a_root_path_does_not_lead_past_the_keys(serve):
    served = serve(api_keys=("one",), root_path="/proxy")
    for path in ("/v1/models", "/proxy/v1/models", "/v1%2Fmodels", "/%76%31/models"):
        assert served.call("GET", path).status_code == 401, path
    assert served.call("GET", "/proxy/v1/models", headers={"x-api-key": "one"}).status_code == 200


def test_the_users_share_is_that_of_the_key_or_of_the_user_named(serve):
    served = serve(api_keys=("one", "two"))
    served.post(CHAT, CHAT_BODY, headers={"x-api-key": "two"})
    served.post(CHAT, CHAT_BODY | {"user": "ann"}, headers={"x-api-key": "two"})
    served.post(CHAT, CHAT_BODY | {"user": ""}, headers={"x-api-key": "one"})
    assert [request.user for request in served.engine.added] == ["key-2", "ann", "key-1"]


def test_requests_that_come_too_fast_are_told_when_to_come_again(serve, refusal):
    served = serve(rate_limit=2)
    assert [served.chat().status_code for _ in range(2)] == [200, 200]
    response = served.chat()
    assert "2 a minute" in refusal(response, 429, None)
    assert 1 <= int(response.headers["retry-after"]) <= 30
    assert served.call("GET", "/v1/models").status_code == 200


def test_each_key_has_its_own_rate(serve):
    served = serve(rate_limit=1, api_keys=("one", "two"))

    def status(key):
        return served.post(CHAT, CHAT_BODY, headers={"x-api-key": key}).status_code

    assert [status("one"), status("one"), status("two"), status("two")] == [200, 429, 200, 429]


def test_the_rate_limiter_counts_time():
    now = [0.0]
    limiter = RateLimiter(60, lambda: now[0])
    assert sum(limiter.seconds_to_wait("a") == 0 for _ in range(100)) == 60
    assert limiter.seconds_to_wait("a") == pytest.approx(1.0)
    now[0] = 0.5
    assert limiter.seconds_to_wait("a") == pytest.approx(0.5)
    now[0] = 1.0
    assert limiter.seconds_to_wait("a") == 0
    assert limiter.seconds_to_wait("b") == 0
    slow = RateLimiter(0.5, lambda: now[0])
    assert slow.seconds_to_wait("a") == 0
    assert slow.seconds_to_wait("a") == pytest.approx(120)


def test_the_rate_limiter_remembers_a_bounded_number_of_clients():
    limiter = RateLimiter(1)
    for number in range(MAX_CLIENTS + 50):
        limiter.seconds_to_wait(str(number))
    assert limiter.seconds_to_wait(str(MAX_CLIENTS + 49)) > 0
    assert limiter.seconds_to_wait("0") == 0


def test_admission_counts_sequences():
    admission = Admission(4)
    admission.take(3)
    with pytest.raises(ApiError) as full:
        admission.take(2)
    assert (full.value.status, full.value.headers) == (429, {"retry-after": "1"})
    with pytest.raises(InvalidRequestError) as never:
        admission.take(1, 5)
    assert never.value.param == "n"
    admission.give_back(3)
    with admission.enter(4):
        assert (admission.num_sequences, admission.num_requests) == (4, 1)
    assert (admission.num_sequences, admission.num_requests, admission.num_refused) == (0, 0, 1)


def test_large_bodies_are_refused_by_their_declared_length(serve, refusal):
    served = serve(max_body_bytes=2000)
    refusal(served.call("POST", CHAT, content=b"x" * 2001, headers={"content-type": "application/json"}), 413, None)
    refusal(served.call("POST", CHAT, content=b"{", headers={"content-length": "9" * 5000}), 413, None)
    assert served.chat("x" * 100).status_code == 200


def test_large_bodies_are_refused_when_they_do_not_say_how_long_they_are(serve, refusal):
    served = serve(max_body_bytes=2000)
    taken = []

    async def endless():
        for _ in range(1000):
            taken.append(1)
            yield b"x" * 500

    async def use(client):
        return await client.post(CHAT, content=endless(), headers={"content-type": "application/json"})

    refusal(served.run(use), 413, None)
    assert len(taken) <= 6


@pytest.mark.parametrize("size", [33, 50])
def test_the_default_limit(served, refusal, size):
    body = b'{"messages": "' + b"x" * (size * 2**20) + b'"}'
    refusal(served.call("POST", CHAT, content=body, headers={"content-type": "application/json"}), 413, None)


def test_request_ids(served, refusal):
    assert served.chat().headers["x-request-id"] != served.chat().headers["x-request-id"]
    response = served.post(CHAT, CHAT_BODY | {"request_id": "mine"})
    assert response.headers["x-request-id"] == "mine"
    assert response.json()["id"] == "chatcmpl-mine"
    response = served.post(CHAT, CHAT_BODY | {"request_id": "mine"}, headers={"x-request-id": "header"})
    assert (response.headers["x-request-id"], response.json()["id"]) == ("header", "chatcmpl-header")
    for bad in ("x" * 257, "tab\there", "ö"):
        response = served.post(CHAT, CHAT_BODY, headers={"x-request-id": bad.encode()})
        refusal(response, 400, "request_id")
        assert response.headers["x-request-id"] != bad
    assert served.call("GET", "/health", headers={"x-request-id": "abc"}).headers["x-request-id"] == "abc"


def test_equal_ids_at_once_do_not_mix_answers(served):
    served.engine.answers = ["Hello", "World"]

    async def use(client):
        bodies = [{"prompt": "hi", "n": 2, "request_id": "same"}] * 8
        responses = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
        return [[choice["text"] for choice in response.json()["choices"]] for response in responses]

    assert served.run(use) == [["Hello", "World"]] * 8


def test_web_pages_of_others_are_let_in_only_by_name(serve):
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert serve().call("OPTIONS", CHAT, headers=preflight).status_code == 405
    served = serve(allowed_origins=("https://a.example",), api_keys=("one",))
    response = served.call("OPTIONS", CHAT, headers=preflight)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    refused = served.post(CHAT, CHAT_BODY, headers={"origin": "https://a.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    other = served.call("OPTIONS", CHAT, headers=preflight | {"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


def test_middleware_of_the_operator(serve, tmp_path, monkeypatch):
    (tmp_path / "server_layers.py").write_text(
        textwrap.dedent(
            """
            class Outer:
                def __init__(self, app):
                    self.app = app
                async def __call__(self, scope, receive, send):
                    scope["layers"] = scope.get("layers", "") + "outer "
                    await self.app(scope, receive, send)

            async def inner(request, call_next):
                response = await call_next(request)
                response.headers["x-layers"] = request.scope["layers"] + "inner"
                return response

            number = 5
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    served = serve(middleware=("server_layers:Outer", "server_layers.inner"))
    assert served.call("GET", "/version").headers["x-layers"] == "outer inner"
    assert served.chat().json()["choices"][0]["message"]["content"] == "Hello"
    for bad in ("server_layers:missing", "no_such_module:x", "word", "server_layers:number"):
        with pytest.raises(ConfigError, match=bad):
            serve(middleware=(bad,))


def test_control_endpoints_are_there_only_on_demand(served, serve, refusal):
    for path in ("/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/start_profile", "/stop_profile"):
        refusal(served.call("POST", path), 404, None)
    refusal(served.call("GET", "/server_info"), 404, None)
    refusal(serve(enable_control_endpoints=True).call("POST", "/sleep?level=3"), 400, "level")


def test_log_lines_cannot_be_forged(served, caplog):
    served.app  # noqa: B018 - built before the log is read
    response = served.call("GET", "/v1/a%0d%0a2026 ERROR forged")
    assert response.status_code == 404
    assert all("\n" not in record.getMessage() for record in caplog.records)
    body = CHAT_BODY | {"a\nb": json.dumps("x")}
    served.post(CHAT, body)
    assert all("\n" not in record.getMessage() for record in caplog.records)
