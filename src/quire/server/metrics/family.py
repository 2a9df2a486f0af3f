"""What a metric is: its name on the wire, its meaning, and where its figure comes from.

Names and labels are vLLM's where it has one, so that boards and autoscalers made for it work; what
only Quire counts is called ``quire:…``. docs/reference/metrics.md has the same table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from quire.engine.statistics import Histogram
from quire.server.metrics.reading import Reading

Figures: TypeAlias = Mapping[tuple[str, ...], float | Histogram]  # by the values of the labels

ENGINE = ("model_name", "engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """``read``: the figures by the values of ``labels``; those of ``ENGINE`` are added to them."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    read: Callable[[Reading], Figures]
    labels: tuple[str, ...] = ()  # besides those of where it is counted
    of: tuple[str, ...] = ENGINE


def one(
    kind: Literal["counter", "gauge", "histogram"],
    name: str,
    unit: str,
    meaning: str,
    read: Callable[[Reading], float | Histogram],
) -> Family:
    """A single figure."""
    return Family(
        name=name,
        kind=kind,
        unit=unit,
        meaning=meaning,
        read=lambda reading: {(): read(reading)},
    )


def each(
    kind: Literal["counter", "gauge"],
    name: str,
    unit: str,
    label: str,
    meaning: str,
    read: Callable[[Reading], Mapping[str, float]],
) -> Family:
    """A figure for each value of a label."""
    return Family(
        name=name,
        kind=kind,
        unit=unit,
        meaning=meaning,
        labels=(label,),
        read=lambda reading: {(value,): count for value, count in read(reading).items()},
    )
