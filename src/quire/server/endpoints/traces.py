"""A span for each prompt that has come to its end, if a collector is named."""

from collections.abc import Sequence
from typing import final

from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request
from quire.server.exchange import Exchange
from quire.server.tracing import RequestRecord

_CONTEXT = ("traceparent", "tracestate")


@final
class Traces:
    """Of one exchange. Who leaves early leaves no span."""

    def __init__(self, exchange: Exchange, requests: Sequence[Request], operation: str) -> None:
        self._exchange, self._requests, self._operation = exchange, requests, operation
        self._tracer = exchange.service.tracer
        self._num_tokens = [0] * len(requests)
        self._ends: list[list[TextDelta]] = [[] for _ in requests]

    def add(self, index: int, delta: TextDelta) -> None:
        if self._tracer is None:
            return
        self._num_tokens[index] += len(delta.token_ids)
        if delta.finish_reason is None:
            return
        self._ends[index].append(delta)
        if (
            len(self._ends[index]) == self._requests[index].num_choices
            and delta.latencies is not None
        ):
            self._tracer.note(self._record(index))

    def _record(self, index: int) -> RequestRecord:
        request, ends, exchange = self._requests[index], self._ends[index], self._exchange
        assert ends[-1].latencies is not None
        headers = {name: exchange.http.headers.get(name) for name in _CONTEXT}
        return RequestRecord(
            request_id=f"{exchange.id}-{index}",
            model=exchange.service.model_name,
            operation=self._operation,
            arrived_unix_s=exchange.arrived_unix_s,
            latencies=ends[-1].latencies,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=ends[-1].num_cached_tokens,
            num_generation_tokens=self._num_tokens[index],
            finish_reasons=tuple(str(end.finish_reason) for end in ends),
            n=request.num_choices,
            max_tokens=request.params.max_tokens,
            temperature=request.params.temperature,
            top_p=request.params.top_p,
            headers={name: value for name, value in headers.items() if value is not None},
        )
