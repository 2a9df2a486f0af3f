"""What Prometheus scrapes: vLLM's names, and Quire's bytes. ``grafana.json`` is a board for it."""

from quire.server.metrics.counts import METHODS, REJECTIONS, Rejection
from quire.server.metrics.exposition import Metrics
from quire.server.metrics.families import FAMILIES
from quire.server.metrics.family import Family

__all__ = ["FAMILIES", "METHODS", "REJECTIONS", "Family", "Metrics", "Rejection"]
