"""The answer to a scrape, in Prometheus' text format.

It is not OpenMetrics: there prometheus-client escapes the colons of names by default, and every
scraper reads this format.
"""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from quire.engine.async_llm import AsyncLLM
from quire.engine.llm import LLM
from quire.engine.statistics import Histogram
from quire.server.metrics.definitions import FAMILIES
from quire.server.metrics.family import Counts, MetricFamily, MetricReading, read


class Metrics(Collector):
    """The metrics of one engine, read at each scrape without waiting for it.

    ``model_name`` is the name that it is served under. An engine that was closed or has failed is
    read as it is.
    """

    def __init__(self, llm: LLM | AsyncLLM, model_name: str) -> None:
        self._llm = llm.llm if isinstance(llm, AsyncLLM) else llm
        # A line end would end the sample.
        name = "".join(each for each in model_name if each.isprintable())
        self._values = {"model_name": name, "engine": "0"}
        self.counts = Counts()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> tuple[bytes, str]:
        """Return the metrics, and their content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def describe(self) -> list[Metric]:
        """Return nothing: beside the process no other collector could have the same names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all families, as prometheus_client has them."""
        reading = read(self._llm, self.counts)
        for family in FAMILIES:
            yield self._metric(family, reading)

    def _metric(self, family: MetricFamily, reading: MetricReading) -> Metric:
        labels = (*family.of, *family.labels)
        base = [self._values[label] for label in family.of]
        figures = [([*base, *values], each) for values, each in family.read(reading).items()]
        if family.kind == "histogram":
            histogram = HistogramMetricFamily(family.name, family.meaning, labels=labels)
            for values, each in figures:
                assert isinstance(each, Histogram), family.name
                histogram.add_metric(values, _buckets(each), each.sum)
            return histogram
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        metric = kind(family.name, family.meaning, labels=labels)
        for values, each in figures:
            assert not isinstance(each, Histogram), family.name
            metric.add_metric(values, each)
        return metric


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return how many values were at most each bound."""
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(list(histogram.counts)), strict=True))
