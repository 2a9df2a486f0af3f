"""What a metric is: its name, its meaning, and where its figure comes from.

Names and labels are vLLM's where it has one, so that dashboards and autoscalers made for it work;
what only Quire counts is called ``quire:…``. docs/reference/metrics.md has the same table.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, get_args

from quire.engine.elastic import Elasticity
from quire.engine.event_publisher import EventPublisher
from quire.engine.llm import LLM
from quire.engine.scheduling.offload_policy import OffloadReport
from quire.engine.statistics import Histogram, Statistics
from quire.kv import Usage
from quire.kv.interface import found_block_size

# -- what the server counts ------------------------------------------------------------------------


Rejection = Literal[
    "max_num_queued_reqs",  # vLLM's two
    "max_num_queued_tokens",
    "max_num_reqs_per_key",
    "pixels",  # of images of requests under way
    "draining",  # the server is being shut down
    "sleeping",  # an operator has put it to sleep
]
REJECTIONS: tuple[str, ...] = get_args(Rejection)
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
OTHER = "other"


class Counts:
    """What the server itself counts: answers, and refusals before the engine saw the request.

    Any thread may count and read. Whatever a client sends ends in a closed set of labels, so that
    no client can make them grow.
    """

    def __init__(self) -> None:
        self._routes: set[str] = set()
        self._lock = threading.Lock()
        self._answers: Counter[tuple[str, ...]] = Counter()
        self._rejections = dict.fromkeys(REJECTIONS, 0)

    def know(self, route: str) -> None:
        """Give the template of a path a label of its own."""
        self._routes.add(route)

    def note_answer(self, method: str, route: str, status: int) -> None:
        """Count an HTTP answer; ``route`` is the template of its path."""
        labels = (
            route if route in self._routes else OTHER,
            method if method in METHODS else OTHER,
            str(status) if 100 <= status <= 599 else OTHER,
        )
        with self._lock:
            self._answers[labels] += 1

    def note_rejection(self, reason: str) -> None:
        """Count a request that was refused before it reached the engine. Raises: ValueError for a
        reason that has no label.
        """
        if reason not in self._rejections:
            raise ValueError(f"reason={reason!r} must be one of {', '.join(REJECTIONS)}")
        with self._lock:
            self._rejections[reason] += 1

    @property
    def answers(self) -> dict[tuple[str, ...], float]:
        """Return how many, by route, method and status."""
        with self._lock:
            return {labels: count for labels, count in self._answers.items()}

    @property
    def rejections(self) -> dict[str, int]:
        """Return how many, by reason."""
        with self._lock:
            return dict(self._rejections)


# -- figures of one moment -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricReading:
    """An engine's figures at one moment, read without waiting for a step.

    ``statistics`` go on counting meanwhile.
    """

    statistics: Statistics
    usage: Usage
    elastic: Elasticity
    num_running: int
    waiting: Mapping[str, int]  # by reason
    swap_used_bytes: int
    is_up: bool
    sleep_level: int
    cache_config: Mapping[str, str]
    kv_events: EventPublisher | None
    tiers: OffloadReport | None
    counts: Counts

    @property
    def usage_share(self) -> float:
        """Return the share of the ceiling that sequences hold. Cached memory is free for others."""
        held = self.usage.committed_bytes - self.usage.cached_bytes
        return held / self.elastic.ceiling_bytes if self.elastic.ceiling_bytes else 0.0


@dataclass(frozen=True, slots=True)
class ServerReading:
    """The figures of a server without an engine of its own."""

    counts: Counts


def read(llm: LLM, counts: Counts) -> MetricReading:
    """Read an engine's figures."""
    scheduler = llm.engine.scheduler
    return MetricReading(
        statistics=llm.statistics,
        usage=llm.usage(wait=False),
        elastic=llm.elastic,
        num_running=scheduler.num_running,
        waiting=scheduler.waiting_by_reason,
        swap_used_bytes=scheduler.swap.used_bytes,
        is_up=not llm.is_closed,
        sleep_level=llm.sleep_level,
        cache_config=_cache_config(llm),
        kv_events=llm.kv_events,
        tiers=llm.tiers,
        counts=counts,
    )


def _cache_config(llm: LLM) -> Mapping[str, str]:
    """Return the cache's configuration under vLLM's names."""
    config, capacity_bytes = llm.config, llm.elastic.capacity_bytes
    block_size = found_block_size(llm.accounting, config.block_size)
    block_bytes = sum(group.bytes_for(block_size) for group in llm.spec.groups)
    return MappingProxyType(
        {
            "block_size": str(block_size),
            "cache_dtype": config.kv_cache_dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "kv_cache_memory_bytes": str(capacity_bytes),
            "kv_strategy": config.cache,
            "num_gpu_blocks": str(capacity_bytes // block_bytes if block_bytes else 0),
        }
    )


# -- metric families -------------------------------------------------------------------------------


Figures: TypeAlias = Mapping[tuple[str, ...], float | Histogram]  # by the values of the labels

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

ENGINE = ("model_name", "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    """One metric. ``read`` gives the figures by the values of ``labels``; those of ``of`` are
    added. What it is given to read is its source's.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    read: Callable[[Any], Figures]
    labels: tuple[str, ...] = ()  # besides those in ``of``
    of: tuple[str, ...] = ENGINE


class MetricSource(Protocol):
    """Families, and what they are read from."""

    @property
    def families(self) -> Sequence[MetricFamily]:
        """Return its families."""
        ...

    async def ask(self) -> None:
        """Ask for figures that are in other processes, in bounded time."""
        ...

    def reading(self) -> Any:
        """Return what each family's ``read`` is given, at this moment."""
        ...


def _one(
    kind: Kind,
    name: str,
    unit: str,
    meaning: str,
    read: Callable[[MetricReading], float | Histogram],
) -> MetricFamily:
    """Return a metric with a single figure."""

    def figures(reading: MetricReading) -> Figures:
        return {(): read(reading)}

    return MetricFamily(name=name, kind=kind, unit=unit, meaning=meaning, read=figures)


def _each(
    kind: Kind,
    name: str,
    unit: str,
    label: str,
    meaning: str,
    read: Callable[[MetricReading], Mapping[str, float | Histogram]],
) -> MetricFamily:
    """Return a metric with a figure for each value of a label."""

    def figures(reading: MetricReading) -> Figures:
        return {(value,): count for value, count in read(reading).items()}

    return MetricFamily(
        name=name, kind=kind, unit=unit, meaning=meaning, labels=(label,), read=figures
    )


counter, gauge, histogram = (partial(_one, kind) for kind in get_args(Kind))
counters, gauges, histograms = (partial(_each, kind) for kind in get_args(Kind))
