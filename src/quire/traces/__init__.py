"""Traffic as it was met elsewhere, read as a stream, and traffic that is drawn."""

from quire.traces.log import RequestLog
from quire.traces.opening import form_names, open_trace
from quire.traces.request import TraceRequest
from quire.traces.trace import ReadCounts, Trace

__all__ = ["ReadCounts", "RequestLog", "Trace", "TraceRequest", "form_names", "open_trace"]
