"""What the server's own description allows and what it forbids is sent to every endpoint: the server answers as the
description says, never with a fault of its own, and an error names what is to blame. LLMKIT_DEEP_TESTS=1 sends more."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from llmkit_server.app import CONTROL_ROUTERS, ROUTERS

DEEP = os.environ.get("LLMKIT_DEEP_TESTS") == "1"

NUM_EXAMPLES = 400 if DEEP else 12

OPERATIONS = sorted(
    (method, route.path)
    for router in (*ROUTERS, *CONTROL_ROUTERS)
    for route in router.routes
    if getattr(route, "include_in_schema", False)
    for method in route.methods
)


class Engine:
    """The calls that a scripted engine does not know."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def nothing(self, *_: Any) -> None:
        return

    async def yes(self, *_: Any) -> bool:
        return True

    async def path(self, *_: Any) -> Path:
        return self.folder


@pytest.fixture(scope="module")
def target(make_served, tmp_path_factory):
    served = make_served(
        enable_control_endpoints=True, tool_parser="hermes", reasoning_parser="qwen3", max_stored_responses=4
    )
    llm, calls = served.llm, Engine(tmp_path_factory.mktemp("profiles"))
    for name in ("sleep", "wake_up", "start_profile", "stats"):
        setattr(llm, name, calls.nothing)
    llm.is_sleeping = llm.reset_prefix_cache = calls.yes
    llm.stop_profile = calls.path
    served.engine.answers = ["Hello"]
    return served


@pytest.fixture(scope="module")
def document(target):
    return json.loads(target.call("GET", "/openapi.json").text)


@pytest.fixture(scope="module")
def description(document):
    return schemathesis.openapi.from_dict(document)


def test_every_route_is_described(document):
    described = [(method.upper(), path) for path, item in document["paths"].items() for method in item]
    assert sorted(described) == sorted((method, in_document(path)) for method, path in OPERATIONS)


def in_document(path):
    return re.sub(r":\w+}", "}", path)


def send(target, case):
    """As the bytes that a client would send, without a socket."""
    sent = {"method", "url", "headers", "params", "json", "data", "cookies"}
    arguments = case.as_transport_kwargs(base_url="http://server")
    request = requests.Request(**{name: value for name, value in arguments.items() if name in sent}).prepare()
    return target.call(request.method, request.url, headers=dict(request.headers), content=request.body)


def fields_of(document, method, path):
    """The names that an error may give: of the body's fields, and of parameters."""
    operation = document["paths"][path][method.lower()]
    names = {parameter["name"] for parameter in operation.get("parameters", ())}
    if "requestBody" in operation:
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        names |= set(document["components"]["schemas"][reference.rpartition("/")[2]]["properties"])
    return names


def check_response(response, case, fields):
    """No fault of the server's; 501 is said of what is not supported. An error about a body that could be read, or
    about a path or query, names a field."""
    status = response.status_code
    assert status < 500 or status == 501, response.text
    case.operation.validate_response(response, case=case)
    if status in (400, 404, 501) and "not valid JSON" not in response.text and "JSON object" not in response.text:
        error = response.json()["error"]
        known = fields | set(case.body if isinstance(case.body, dict) else ())
        if "param" in error:
            assert str(error["param"]).partition(".")[0] in known | {"model"}, response.text
        else:
            assert any(name in error["message"] for name in known), response.text


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_an_endpoint_takes_whatever_comes(target, document, description, method, path):
    operation = description[in_document(path)][method]
    fields = fields_of(document, method, in_document(path))
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    cases = st.one_of(operation.as_strategy(generation_mode=mode) for mode in modes)

    @settings(
        max_examples=NUM_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, exists=st.booleans())
    def check(case, exists):
        if exists and "response_id" in case.path_parameters:
            case.path_parameters["response_id"] = target.post("/v1/responses", {"input": "hi"}).json()["id"]
        check_response(send(target, case), case, fields)

    check()
    assert target.llm.num_unfinished == 0
    assert target.context.admission.num_sequences == 0
    assert target.call("GET", "/health").status_code == 200
