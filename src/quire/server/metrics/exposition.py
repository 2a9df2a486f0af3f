"""The answer to a scrape, in Prometheus' text format.

It is not OpenMetrics: there prometheus-client escapes the colons of names by default, and every
scraper reads this format.
"""

from collections.abc import Collection, Iterator
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


class Metrics:
    """The metrics of one engine, read at each scrape without waiting for it.

    ``model_name`` is the name that it is served under. An engine that was closed or has failed is
    read as it is.
    """

    def __init__(
        self, llm: LLM | AsyncLLM, model_name: str, *, routes: Collection[str] = ()
    ) -> None:
        self._llm = llm.llm if isinstance(llm, AsyncLLM) else llm
        # A line ends a sample: what is no text in a name is left out.
        name = "".join(each for each in model_name if each.isprintable())
        self._values = {"model_name": name, "engine": "0"}
        self._counts = Counts(routes)
        self._registry = CollectorRegistry()
        self._registry.register(_Live(self))
        ProcessCollector(registry=self._registry)

    def render(self) -> tuple[bytes, str]:
        """Return the metrics, and their content type."""
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def know(self, route: str) -> None:
        """Answers of this template of a path are counted apart."""
        self._counts.know(route)

    def note_rejection(self, reason: str) -> None:
        """A request was refused before it reached the engine."""
        self._counts.note_rejection(reason)

    def note_answer(self, method: str, route: str, status: int) -> None:
        """An HTTP request was answered; ``route`` is the template of its path."""
        self._counts.note_answer(method, route, status)

    def collect(self) -> Iterator[Metric]:
        """All families, as prometheus_client has them."""
        reading = read(self._llm, self._counts)
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


class _Live(Collector):
    """Read anew by each scrape."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        """Nothing else is in the registry but the process, so there is nothing to tell apart."""
        return []

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect()


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """How many values were at most each bound."""
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    return list(zip(bounds, accumulate(list(histogram.counts)), strict=True))
