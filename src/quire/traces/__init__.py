"""Read traces of real traffic as streams, and make synthetic traffic."""

from quire.traces.request_log import RequestLog
from quire.traces.trace import ReadCounts, Trace, TraceRequest
from quire.traces.trace_formats import form_names, open_trace

__all__ = ["ReadCounts", "RequestLog", "Trace", "TraceRequest", "form_names", "open_trace"]
