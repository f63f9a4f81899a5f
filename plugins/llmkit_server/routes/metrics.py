"""/metrics, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from llmkit_server.context import context_of
from llmkit_server.metrics.collector import ServerCollector
from llmkit_server.openapi import describe

router = APIRouter(tags=["health"])


@router.get("/metrics", openapi_extra=describe())
async def metrics(request: Request) -> Response:
    """Counters, gauges and histograms, in Prometheus' text format or, if asked for, OpenMetrics'."""
    server = context_of(request)
    await server.engine_watch.refresh()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerCollector(server))
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), headers={"content-type": content_type})
