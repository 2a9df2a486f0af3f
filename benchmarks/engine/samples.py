"""What the engine benchmark has measured so far, kept in a file so that a run can be continued."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.engine.workloads import WORKLOADS

OURS, AGAIN = "quire", "quire again"  # the second is the same worker, asked once more

Record: TypeAlias = dict[str, Any]


class Samples:
    """Records in the order in which they came.

    Their ``kind`` is sample, about, idle, profile or refused. What was refused in an earlier run is
    tried again, so it is not read back.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.records: list[Record] = []
        if path and path.exists():
            records = map(json.loads, path.read_text().splitlines())
            self.records = [record for record in records if record["kind"] != "refused"]

    def add(self, kind: str, engine: str, **values: Any) -> None:
        record = {"kind": kind, "engine": engine, **values}
        self.records.append(record)
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def of(self, kind: str) -> dict[str, Record]:
        """The last record of a kind for each engine."""
        return {record["engine"]: record for record in self.records if record["kind"] == kind}

    def has(self, engine: str, workload: str, turn: int) -> bool:
        return any(
            (record["engine"], record["workload"], record["turn"]) == (engine, workload, turn)
            for record in self.samples()
        )

    def samples(self) -> Iterable[Record]:
        return (record for record in self.records if record["kind"] == "sample")

    def rates(self, figure: "Figure", engine: str, *, cut: bool = False) -> dict[int, float]:
        """By round. Samples that were cut short count only if asked for."""
        return {
            record["turn"]: figure.rate(record)
            for record in self.samples()
            if (record["engine"], record["workload"]) == (engine, figure.workload)
            and "error" not in record
            and (cut or not record["cut"])
        }

    def engines(self) -> list[str]:
        return list(dict.fromkeys(record["engine"] for record in self.samples()))

    def best_peer(self, figure: "Figure") -> str | None:
        """By the median of its rounds."""
        medians = {
            engine: statistics.median(rates.values())
            for engine in self.engines()
            if engine not in (OURS, AGAIN) and (rates := self.rates(figure, engine))
        }
        return max(medians, key=lambda engine: medians[engine], default=None)


# -- what is read from a sample ------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Tokens a second, of one workload."""

    name: str
    workload: str
    rate: Callable[[Record], float]
    goal: float  # × the best peer, in sixteen bits


def _output_rate(sample: Record) -> float:
    return float(sample["tokens"] / sample["seconds"])


def _decode_rate(sample: Record) -> float:
    return 1 / sample["token_s"] if sample["token_s"] else float("nan")


def _prefill_rate(sample: Record) -> float:
    return float(WORKLOADS[sample["workload"]].prompt_tokens / sample["prefill_s"])


FIGURES: Mapping[str, Figure] = {
    figure.name: figure
    for figure in (
        Figure(name="16 mixed, output", workload="mixed-16", rate=_output_rate, goal=1.25),
        Figure(name="32 mixed, output", workload="mixed-32", rate=_output_rate, goal=1.25),
        *(
            Figure(
                name=f"one stream at {context:,}",
                workload=f"single-{context}",
                rate=_decode_rate,
                goal=1.1,
            )
            for context in (128, 2048, 8192)
        ),
        Figure(name="prefill of 2,048", workload="single-2048", rate=_prefill_rate, goal=1.15),
        Figure(name="prefill of 8,192", workload="single-8192", rate=_prefill_rate, goal=1.15),
    )
}
