"""Prometheus' metrics: vLLM's names, and Quire's bytes. ``grafana.json`` is a
dashboard for them.
"""

from quire.server.metrics.definitions import FAMILIES
from quire.server.metrics.exposition import Metrics
from quire.server.metrics.family import METHODS, REJECTIONS, MetricFamily, Rejection

__all__ = ["FAMILIES", "METHODS", "REJECTIONS", "MetricFamily", "Metrics", "Rejection"]
