"""OpenTelemetry: a span for every request, in the trace that its client began."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import llmkit
from llmkit.errors import ConfigError
from llmkit.metrics.record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

TRACE_HEADERS = ("traceparent", "tracestate")
MAX_HEADER_CHARS = 1024


def trace_headers(headers: Mapping[str, str]) -> dict[str, str] | None:
    """Of a request's headers those that say which trace it belongs to; None if it says nothing."""
    found = {
        name: headers[name]
        for name in TRACE_HEADERS
        if len(headers.get(name, "")) <= MAX_HEADER_CHARS and name in headers
    }
    return found if "traceparent" in found else None


class Tracing:
    """For `AsyncLLM.on_request_ended`. Names of attributes are those of OpenTelemetry's conventions for generative AI
    and, for latencies, vLLM's."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._model = model
        self._tracer = provider.get_tracer("llmkit", llmkit.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, record: RequestRecord) -> None:
        """Make the span, from the request's arrival to its end."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        offset = time.time_ns() - int(time.monotonic() * 1e9)  # from the engine's clock to that of the calendar
        start = offset + int(record.metrics.arrival_time * 1e9)
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(dict(record.trace_headers or {})),
            kind=SpanKind.SERVER,
            start_time=start,
            attributes={name: value for name, value in self._attributes(record).items() if value is not None},
        )
        if record.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end(start + int(record.total_s * 1e9))

    def _attributes(self, record: RequestRecord) -> dict[str, str | int | float | tuple[str, ...] | None]:
        params = record.params
        return {
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "gen_ai.request.id": record.request_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": record.max_tokens,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": record.num_output_tokens,
            "gen_ai.usage.cached_tokens": record.num_cached_tokens,
            "gen_ai.latency.e2e": record.total_s,
            "gen_ai.latency.time_in_queue": record.queue_s,
            "gen_ai.latency.time_to_first_token": record.first_token_s,
            "gen_ai.latency.time_in_model_prefill": record.prefill_s,
            "gen_ai.latency.time_in_model_decode": record.answer_s,
            "gen_ai.latency.time_in_model_inference": record.inference_s,
        }

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


def start_tracing(endpoint: str, model: str) -> Tracing:
    """Send spans to `endpoint` (OTLP over HTTP) in a thread. Raises ConfigError without the libraries."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"observability.otlp_traces_endpoint needs OpenTelemetry, which is not installed: {error}.",
            hint="pip install 'opentelemetry-sdk>=1.27' 'opentelemetry-exporter-otlp-proto-http>=1.27'",
        ) from None
    # Ends with the server, not with the interpreter: `close` waits for what is still to be sent.
    provider = TracerProvider(resource=Resource.create({"service.name": "llmkit"}), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider, model)
