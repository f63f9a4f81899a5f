"""Lines and spans about requests that have ended."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from llmkit.config import EngineConfig
from llmkit.logs import START_LOGGER, JsonFormatter, LineFormatter, passed_on, set_level
from llmkit_server.middleware.request_log import RequestLog
from llmkit_server.request_lines import RequestLines
from llmkit_server.run import tracing_of
from llmkit_server.tracing import Tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("show", [False, True])
def test_a_line_for_every_request_says_no_prompt_unless_asked(served, caplog, show):
    served.llm.on_request_ended.append(RequestLines(show_prompt=show))
    served.engine.answers = ["Hey"]
    with caplog.at_level(logging.INFO, logger="llmkit.server.requests"):
        served.post("/v1/completions", {"prompt": "secret\nwords", "request_id": "mine"})
        served.engine.fail_after = 1
        served.post("/v1/completions", {"prompt": "secret"})
    first, second = [record for record in caplog.records if record.name == "llmkit.server.requests"]
    line = json.loads(JsonFormatter().format(first))
    assert (line["request_id"], line["finish_reason"]) == (first.request_id, "stop")
    assert (line["prompt_tokens"], line["output_tokens"], line["cached_tokens"]) == (12, 4, 0)
    assert 0 <= line["first_token_s"] <= line["seconds"]
    assert (line["logger"], line["level"]) == ("llmkit.server.requests", "info")
    assert ("secret" in json.dumps(line), "secret" in LineFormatter().format(first)) == (show, show)
    assert "\n" not in LineFormatter().format(first)
    assert (second.finish_reason, second.error) == ("error", "the step broke")


def test_lines_of_the_engine_process_stay_objects():
    assert passed_on("INFO x: y", 7, "text") == "[engine 7] INFO x: y"
    assert passed_on('{"a": 1}', 7, "json") == '{"a": 1}'
    line = json.loads(passed_on("Fatal Python error: %s", 7, "json"))
    assert (line["message"], line["process"], line["level"]) == ("Fatal Python error: %s", 7, "error")


@pytest.mark.parametrize(("level", "told"), [("debug", True), ("info", True), ("warning", True), ("error", False)])
def test_what_a_start_is_busy_with_is_told_by_default(level, told):
    loggers = [logging.getLogger(name) for name in ("llmkit", START_LOGGER)]
    before = [logger.level for logger in loggers]
    try:
        set_level(level)
        assert loggers[1].isEnabledFor(logging.INFO) == told
        assert loggers[0].level == getattr(logging, level.upper())
    finally:
        for logger, number in zip(loggers, before, strict=True):
            logger.setLevel(number)


@pytest.fixture
def spans(served):
    """Calls the server and returns the spans that have ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    served.llm.on_request_ended.append(Tracing(provider, "tiny"))

    def call(body, **headers):
        served.post("/v1/completions", body, headers=headers)
        return exporter.get_finished_spans()

    yield call
    provider.shutdown()


def test_a_span_for_every_request_in_its_clients_trace(served, spans):
    served.engine.answers = ["Hey"]
    body = {"prompt": "abc", "temperature": 0.5, "top_p": 0.9, "max_tokens": 9, "n": 2}
    (span,) = spans(body, traceparent=PARENT)
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    attributes = dict(span.attributes)
    assert span.name == "llm_request"
    assert attributes["gen_ai.response.model"] == "tiny"
    assert attributes["gen_ai.usage.prompt_tokens"] == len(served.engine.added[0].prompt_token_ids)
    assert attributes["gen_ai.usage.completion_tokens"] == 8
    assert (attributes["gen_ai.request.temperature"], attributes["gen_ai.request.top_p"]) == (0.5, 0.9)
    assert (attributes["gen_ai.request.n"], attributes["gen_ai.request.max_tokens"]) == (2, 9)
    assert attributes["gen_ai.response.finish_reasons"] == ("stop", "stop")
    assert attributes["gen_ai.latency.time_to_first_token"] <= attributes["gen_ai.latency.e2e"]
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(attributes["gen_ai.latency.e2e"], abs=1e-6)


@pytest.mark.parametrize("header", [None, "rubbish", "00-" + "0" * 5000])
def test_without_a_usable_header_a_span_begins_its_own_trace(spans, header):
    (span,) = spans({"prompt": "abc"}, **({} if header is None else {"traceparent": header}))
    assert span.parent is None


def test_a_failed_request_is_a_failed_span(served, spans):
    served.engine.fail_after = 1
    (span,) = spans({"prompt": "abc"})
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "the step broke")


def test_tracing_is_off_without_an_endpoint():
    assert tracing_of(EngineConfig(model={"model": "m"})) is None
    tracing = tracing_of(EngineConfig(model={"model": "m"}, observability={"otlp_traces_endpoint": "http://[::1]:1/v"}))
    assert tracing is not None
    tracing.close()


@pytest.mark.parametrize(("words", "told"), [("unable to perform it; the handler is closed", False), ("other", True)])
def test_a_client_that_hung_up_behind_a_request_sent_ahead_is_no_error(caplog, words, told):
    """Its connection is closed for whoever writes to it, and the server has told nobody."""

    async def app(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def closed(_message):
        raise RuntimeError(words)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    answer = RequestLog(app, access_log=False)(scope, None, closed)
    with caplog.at_level(logging.ERROR):
        if told:
            with pytest.raises(RuntimeError):
                asyncio.run(answer)
        else:
            asyncio.run(answer)
    assert bool(caplog.records) == told
