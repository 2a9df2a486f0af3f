"""A span for each request, sent to an OpenTelemetry collector: ``pip install 'quire-kv[otel]'``.

Names are those of the gen_ai conventions, as in vLLM. A span says how long a request took and how
many tokens it had, and nothing of what they were.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request
from quire.engine.statistics import Latencies
from quire.errors import ConfigError

_TRACE_CONTEXT = ("traceparent", "tracestate")  # headers of W3C's Trace Context


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request that has ended. The latencies are those of its last continuation.

    ``headers`` may have a W3C trace context (traceparent, tracestate), whose child the span is.
    """

    request_id: str  # the server's own id
    model: str  # the name under which it is served
    operation: str  # "chat", "text_completion", "transcribe" and the like
    arrived_unix_s: float  # wall clock
    latencies: Latencies
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int  # by all continuations
    finish_reasons: tuple[str, ...]  # one for each continuation
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    headers: Mapping[str, str] | None = None

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of its span, without those that are not known."""
        took = self.latencies
        several: dict[str, Any] = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.request.model": self.model,
            "gen_ai.response.model": self.model,
            "gen_ai.request.id": self.request_id,
            "gen_ai.request.n": self.n,
            "gen_ai.request.max_tokens": self.max_tokens,
            "gen_ai.request.temperature": self.temperature,
            "gen_ai.request.top_p": self.top_p,
            "gen_ai.response.finish_reasons": self.finish_reasons,
            "gen_ai.usage.prompt_tokens": self.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": self.num_generation_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.num_cached_tokens,
            "gen_ai.usage.num_sequences": len(self.finish_reasons),
            "gen_ai.latency.time_in_queue": took.queue_s,
            "gen_ai.latency.time_to_first_token": took.first_token_s,
            "gen_ai.latency.e2e": took.e2e_s,
            "gen_ai.latency.time_in_model_prefill": took.prefill_s,
            "gen_ai.latency.time_in_model_decode": took.decode_s,
            "gen_ai.latency.time_in_model_inference": took.inference_s,
        }
        return {name: value for name, value in several.items() if value is not None}


@final
class Tracer:
    """Sends spans in batches, by a thread of OpenTelemetry's own: ``note`` waits for nothing.

    While the collector is away for long, spans are dropped. ``processor`` gets them instead, if
    given.

    Raises: ConfigError where OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, *, version: str, processor: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
        except ImportError as error:
            raise _missing(error) from error
        resource = Resource.create({"service.name": "quire", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor or _exporting(endpoint))
        self._tracer = self._provider.get_tracer("quire.server", version)

    def note(self, record: RequestRecord) -> None:
        """Send the span of a request that has ended. Raises nothing: no request
        fails for a trace.
        """
        with suppress(Exception):
            self._note(record)

    def close(self) -> None:
        """Send the spans that are left, for some seconds at most. A second call does nothing."""
        self._provider.shutdown()

    def _note(self, record: RequestRecord) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        start_ns = int(record.arrived_unix_s * 1e9)
        span = self._tracer.start_span(
            "llm_request",
            context=TraceContextTextMapPropagator().extract(dict(record.headers or {})),
            kind=SpanKind.SERVER,
            attributes=record.attributes(),
            start_time=start_ns,
        )
        if "error" in record.finish_reasons or "capacity" in record.finish_reasons:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=start_ns + int(record.latencies.e2e_s * 1e9))


@final
class RequestSpans:
    """A span for each prompt of one HTTP request, noted when the prompt's last choice has ended.

    A request whose client leaves early has no span.
    """

    def __init__(
        self,
        tracer: Tracer,
        requests: Sequence[Request],
        *,
        operation: str,
        request_id: str,
        model: str,
        arrived_unix_s: float,
        headers: Mapping[str, str],
    ) -> None:
        self._tracer, self._requests, self._operation = tracer, requests, operation
        self._request_id, self._model, self._arrived_unix_s = request_id, model, arrived_unix_s
        self._headers = {name: headers[name] for name in _TRACE_CONTEXT if name in headers}
        self._num_tokens = [0] * len(requests)
        self._ends: list[list[TextDelta]] = [[] for _ in requests]

    def add(self, index: int, delta: TextDelta) -> None:
        """Count what is new of one prompt; send its span when it has come to its end."""
        self._num_tokens[index] += len(delta.token_ids)
        if delta.finish_reason is None:
            return
        ends, request = self._ends[index], self._requests[index]
        ends.append(delta)
        if len(ends) < request.num_choices or delta.latencies is None:
            return
        record = RequestRecord(
            request_id=f"{self._request_id}-{index}",
            model=self._model,
            operation=self._operation,
            arrived_unix_s=self._arrived_unix_s,
            latencies=delta.latencies,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=delta.num_cached_tokens,
            num_generation_tokens=self._num_tokens[index],
            finish_reasons=tuple(str(end.finish_reason) for end in ends),
            n=request.num_choices,
            max_tokens=request.params.max_tokens,
            temperature=request.params.temperature,
            top_p=request.params.top_p,
            headers=self._headers,
        )
        self._tracer.note(record)


def _exporting(endpoint: str) -> Any:
    """Return a processor that sends batches by HTTP. Raises: ConfigError."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r} must be the URL of a collector's HTTP receiver, as "
            f"http://localhost:4318/v1/traces"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise _missing(error) from error
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(
        f"otlp_traces_endpoint needs OpenTelemetry ({error}): pip install 'quire-kv[otel]', or "
        f"leave the option out"
    )
