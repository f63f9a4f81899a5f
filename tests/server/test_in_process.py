"""The server's routes without sockets."""

import asyncio
import json

from llmkit_server.in_process import InProcessServer


def test_requests_are_answered_and_refused_as_over_http(serve, registry, parse):
    llm = serve(api_keys=("secret",), rate_limit=1.0, root_path="/llm").llm

    async def main():
        server = InProcessServer(llm, registry)
        bodies = [{"prompt": "hi"}, {"prompt": "hi", "temperature": 9}, {"prompt": "hi", "model": "other"}]
        return server.paths, [await server.post("/v1/completions", json.dumps(body).encode()) for body in bodies]

    paths, answers = asyncio.run(main())
    assert {"/v1/completions", "/v1/chat/completions"} <= paths
    assert "/v1/models" not in paths
    assert [status for status, _, _ in answers] == [200, 400, 404]
    assert parse(answers[0][2])["choices"][0]["text"] == "Hello"
    assert parse(answers[1][2])["error"]["param"] == "temperature"
    assert answers[0][1]["x-request-id"]
