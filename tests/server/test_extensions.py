"""Routes of extensions, and the server's own description."""

from __future__ import annotations

import pytest

from llmkit.errors import PluginError
from llmkit.hookspecs import PluginInfo, hookimpl
from llmkit.registry import Registry
from llmkit_server.middleware.paths import CONTROL_PATHS


class Fill:
    info = PluginInfo(summary="a page and a route")

    @staticmethod
    @hookimpl
    def llmkit_server_routes(app, server):
        @app.get("/fill")
        async def fill():
            return {"names": server.models.names}

        @app.get("/health")
        async def not_mine():
            return {"mine": True}

        @app.get("/v1/fill")
        async def guarded():
            return {}


class Broken:
    info = PluginInfo(summary="raises")

    @staticmethod
    @hookimpl
    def llmkit_server_routes(app):
        del app
        raise ZeroDivisionError("no routes today")


def test_extensions_add_routes_and_replace_none(serve_with):
    registry = Registry.discover()
    registry.register("extension", "fill", Fill)
    served = serve_with(registry, extensions=("fill",), server={"api_keys": ("one",)})
    assert served.call("GET", "/fill").json() == {"names": ["models/tiny"]}
    assert served.call("GET", "/health").content == b""
    assert served.call("GET", "/v1/fill").status_code == 401


def test_an_extension_that_fails_ends_the_start(serve_with):
    registry = Registry.discover()
    registry.register("extension", "broken", Broken)
    with pytest.raises(PluginError, match="no routes today"):
        serve_with(registry, extensions=("broken",))


def test_the_description_names_every_endpoint_and_body(serve):
    document = serve(enable_control_endpoints=True, root_path="/llm").call("GET", "/openapi.json").json()
    assert document["servers"] == [{"url": "/llm"}]
    assert set(CONTROL_PATHS) <= set(document["paths"])
    schemas = document["components"]["schemas"]
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        operation = document["paths"][path]["post"]
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert schemas[name]["properties"]["model"]
        assert operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert "temperature" in schemas["CompletionRequest"]["properties"]

    def references(value):
        if isinstance(value, dict):
            yield from [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            for item in value.values():
                yield from references(item)
        elif isinstance(value, list):
            for item in value:
                yield from references(item)

    assert {ref.rpartition("/")[2] for ref in references(document)} <= set(schemas)
