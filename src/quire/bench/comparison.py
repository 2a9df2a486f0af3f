"""Several servers under the same load, side by side: each against the first one, round by round.

A machine is faster at one time than at another, so servers take turns and are compared within a
round; how far the rounds differ says what the comparison is worth.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from quire.bench.metrics import LATENCIES, statistics_of

Round: TypeAlias = Sequence[Mapping[str, Any]]  # the figures of each server, in their order

_RATES = (
    ("request_throughput", "Requests/s"),
    ("output_throughput", "Output tokens/s"),
    ("total_token_throughput", "All tokens/s"),
)
_LABEL, _FIGURE, _RATIO = 24, 12, 26  # columns


def compared(
    urls: Sequence[str], rounds: Sequence[Round], percentiles: Sequence[float]
) -> dict[str, Any]:
    """Return figures of servers beside each other: medians over the rounds, and ratios.

    A ratio is that of a server to the first one, in the same round: its median, least and most.
    Latencies are in milliseconds. A figure that is 0 at the first server has no ratio.
    """
    figures = {}
    for key, _ in _keys(percentiles):
        values = np.array([[server[key] for server in each] for each in rounds], float)
        found: dict[str, Any] = {"median": np.median(values, axis=0).tolist()}
        if (values[:, 0] > 0).all():
            ratios = values / values[:, :1]
            found["ratio"] = np.median(ratios, axis=0).tolist()
            found["least_ratio"] = ratios.min(axis=0).tolist()
            found["most_ratio"] = ratios.max(axis=0).tolist()
        figures[key] = found
    return {
        "urls": list(urls),
        "num_rounds": len(rounds),
        "failed": [sum(each[place]["failed"] for each in rounds) for place in range(len(urls))],
        "figures": figures,
        "rounds": [[dict(server) for server in each] for each in rounds],
    }


def comparison_table(found: Mapping[str, Any], percentiles: Sequence[float]) -> str:
    """Return ``compared``'s figures as a table: a column for each server, and its ratios."""
    return "\n".join(_lines(found, percentiles))


def _lines(found: Mapping[str, Any], percentiles: Sequence[float]) -> Iterator[str]:
    names = [chr(ord("A") + place) for place in range(len(found["urls"]))]
    for name, url, failed in zip(names, found["urls"], found["failed"], strict=True):
        yield f"{name}  {url}" + (f"  ({failed:,} requests failed)" if failed else "")
    rounds = f"{found['num_rounds']} rounds" if found["num_rounds"] > 1 else "one round"
    yield f"medians of {rounds}; in brackets the least and the most ratio of a round"
    yield ""
    heads = "".join(f"{name:>{_FIGURE}}" for name in names)
    ratios = "".join(f"{f'{name} / A':>{_RATIO}}" for name in names[1:])
    yield f"{'':<{_LABEL}}{heads}{ratios}"
    for key, label in _keys(percentiles):
        figure = found["figures"][key]
        cells = "".join(f"{value:>{_FIGURE},.2f}" for value in figure["median"])
        for place in range(1, len(names)):
            cells += f"{_ratio(figure, place):>{_RATIO}}"
        yield f"{label:<{_LABEL}}{cells}".rstrip()


def _ratio(figure: Mapping[str, Any], place: int) -> str:
    if "ratio" not in figure:
        return "–"
    least, most = figure["least_ratio"][place], figure["most_ratio"][place]
    return f"{figure['ratio'][place]:.3f} [{least:.3f}, {most:.3f}]"


def _keys(percentiles: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yield the figures that are compared, with what they are called."""
    yield from _RATES
    for key, name, _ in LATENCIES:
        yield from statistics_of(key, name, percentiles)
