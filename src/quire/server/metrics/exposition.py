"""The answer to a scrape, in Prometheus' text format.

It is not OpenMetrics: there prometheus-client escapes the colons of names by default, and every
scraper reads this format.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, final

from prometheus_client import ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from quire.engine.llm import LLM
from quire.engine.statistics import Histogram
from quire.server.metrics.definitions import FAMILIES, SERVER_FAMILIES
from quire.server.metrics.family import (
    Counts,
    Figures,
    MetricFamily,
    MetricSource,
    ServerReading,
    read,
)


@final
class _EngineFigures:
    """The figures of an engine and its server."""

    def __init__(self, llm: LLM | None, counts: Counts) -> None:
        self._llm, self._counts = llm, counts

    @property
    def families(self) -> Sequence[MetricFamily]:
        return SERVER_FAMILIES if self._llm is None else FAMILIES

    async def ask(self) -> None:
        """Do nothing: all of it is here."""

    def reading(self) -> Any:
        return ServerReading(self._counts) if self._llm is None else read(self._llm, self._counts)


@final
class _Collected(Collector):
    """What a scrape has found, as prometheus_client wants it."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


@final
class Metrics:
    """The metrics of one engine, read at each scrape without waiting for it.

    ``model_name`` is the name that it is served under. An engine that was closed or has failed is
    read as it is; of one that is elsewhere (None) only the server's own are. ``more`` are read
    besides.
    """

    def __init__(self, llm: LLM | None, model_name: str, more: Sequence[MetricSource] = ()) -> None:
        # A line end would end the sample.
        name = "".join(each for each in model_name if each.isprintable())
        self._values = {"model_name": name, "engine": "0"}
        self.counts = Counts()
        self._sources = (_EngineFigures(llm, self.counts), *more)
        self._process = ProcessCollector(registry=None)

    async def scrape(self) -> tuple[bytes, str]:
        """Ask for what is elsewhere, and return the metrics and their content type.

        The text is written in another thread: that of many engines takes a while.
        """
        await asyncio.gather(*(source.ask() for source in self._sources))
        return await asyncio.to_thread(self._rendered, self._found())

    def render(self) -> tuple[bytes, str]:
        """Return the metrics as they are known here, and their content type."""
        return self._rendered(self._found())

    def _found(self) -> list[tuple[MetricFamily, Figures]]:
        """Read all families."""
        return [
            (family, family.read(reading))
            for source in self._sources
            for reading in [source.reading()]
            for family in source.families
        ]

    def _rendered(self, found: Sequence[tuple[MetricFamily, Figures]]) -> tuple[bytes, str]:
        metrics = (self._metric(*each) for each in found)
        collected = _Collected(chain(metrics, self._process.collect()))
        return generate_latest(collected), CONTENT_TYPE_PLAIN_0_0_4

    def _metric(self, family: MetricFamily, read: Figures) -> Metric:
        labels = (*family.of, *family.labels)
        base = [self._values[label] for label in family.of]
        figures = [([*base, *values], each) for values, each in read.items()]
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
