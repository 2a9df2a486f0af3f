"""Traffic as it was met elsewhere, read as a stream, and traffic that is drawn."""

from quire.traces.formats import form_names, open_trace
from quire.traces.request_log import RequestLog
from quire.traces.trace import ReadCounts, Trace, TraceRequest

__all__ = ["ReadCounts", "RequestLog", "Trace", "TraceRequest", "form_names", "open_trace"]
