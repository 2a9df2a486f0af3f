"""A span says how long a request took and how many tokens it had, and nothing of what they were."""

import builtins
import gzip
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from engine.test_llm import GREEDY, small
from quire.engine.statistics import Latencies
from quire.errors import ConfigError
from quire.server.tracing import RequestRecord, Tracer

RECORD = RequestRecord(
    request_id="cmpl-7",
    model="tiny",
    operation="text_completion",
    arrived_unix_s=1000.0,
    latencies=Latencies(
        e2e_s=3.0, queue_s=0.5, first_token_s=1.0, prefill_s=0.5, decode_s=2.0, inference_s=2.5
    ),
    num_prompt_tokens=40,
    num_cached_tokens=32,
    num_generation_tokens=20,
    finish_reasons=("length", "stop"),
    n=2,
    max_tokens=10,
    temperature=0.0,
)


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Iterator[Tracer]:
    own = Tracer("http://nowhere/v1/traces", version="1", processor=SimpleSpanProcessor(exporter))
    yield own
    own.close()


def test_a_request_is_a_span(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    tracer.note(RECORD)
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind) == ("llm_request", SpanKind.SERVER)
    assert (span.start_time, span.end_time) == (1000 * 10**9, 1003 * 10**9)
    assert span.status.status_code == StatusCode.UNSET
    assert span.resource.attributes["service.name"] == "quire"
    assert dict(span.attributes or {}) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.id": "cmpl-7",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 10,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.response.finish_reasons": ("length", "stop"),
        "gen_ai.usage.prompt_tokens": 40,
        "gen_ai.usage.completion_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 32,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.e2e": 3.0,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.5,
    }


def test_what_is_not_known_is_left_out(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    waited = Latencies(
        e2e_s=9.0, queue_s=9.0, first_token_s=None, prefill_s=None, decode_s=None, inference_s=None
    )
    tracer.note(replace(RECORD, latencies=waited, finish_reasons=("error",), max_tokens=None))
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code == StatusCode.ERROR
    assert "gen_ai.request.max_tokens" not in (span.attributes or {})
    assert "gen_ai.latency.time_to_first_token" not in (span.attributes or {})


def test_it_is_the_child_of_the_clients_span(
    tracer: Tracer, exporter: InMemorySpanExporter
) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    tracer.note(replace(RECORD, headers={"traceparent": f"00-{trace}-{parent}-01"}))
    tracer.note(replace(RECORD, headers={"traceparent": "evil\r\n"}))
    child, orphan = exporter.get_finished_spans()
    assert child.parent is not None
    assert f"{child.parent.span_id:016x}" == parent
    assert child.context is not None
    assert f"{child.context.trace_id:032x}" == trace
    assert orphan.parent is None


def test_latencies_of_a_real_request_fit(tracer: Tracer, exporter: InMemorySpanExporter) -> None:
    deltas: list[Any] = []
    with small() as llm:
        llm.start(llm.request([5, 6, 7], GREEDY), deltas.append)
        while llm.step():
            pass
    tracer.note(replace(RECORD, latencies=deltas[-1].latencies))
    (span,) = exporter.get_finished_spans()
    found = dict(span.attributes or {})
    parts = found["gen_ai.latency.time_in_queue"] + found["gen_ai.latency.time_in_model_inference"]
    assert parts == pytest.approx(found["gen_ai.latency.e2e"])


def test_a_broken_exporter_costs_no_request(exporter: InMemorySpanExporter) -> None:
    class Broken(SimpleSpanProcessor):
        def on_end(self, span: Any) -> None:
            raise OSError("no network")

    tracer = Tracer("http://nowhere", version="1", processor=Broken(exporter))
    tracer.note(RECORD)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'quire-kv\[otel\]'"):
        Tracer("http://localhost:4318/v1/traces", version="1")


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ConfigError, match="localhost:4317"):
        Tracer("localhost:4317", version="1")


def test_a_collector_gets_it_over_http() -> None:
    """The real exporter, to a collector that only keeps what it was sent."""
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            zipped = self.headers.get("Content-Encoding") == "gzip"
            bodies.append(gzip.decompress(body) if zipped else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        tracer = Tracer(f"http://127.0.0.1:{server.server_port}/v1/traces", version="1")
        tracer.note(RECORD)
        tracer.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    (body,) = bodies
    message = ExportTraceServiceRequest.FromString(body)
    (span,) = message.resource_spans[0].scope_spans[0].spans
    assert span.name == "llm_request"
