"""Every metric that is exported."""

from quire.server.metrics.counters import COUNTERS
from quire.server.metrics.gauges import GAUGES
from quire.server.metrics.histograms import HISTOGRAMS

FAMILIES = (*GAUGES, *COUNTERS, *HISTOGRAMS)
