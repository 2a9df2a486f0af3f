"""Rounds of the engine benchmark: in each, every engine does every workload, one after the other.

Engines stay loaded from the first round to the last, and are asked in turns. Those that are known
to be far behind do one round of the shorter workloads, alone in memory, each cut after a while.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.engine.peers import WEIGHTS, Peer, Say
from benchmarks.engine.process import Worker, WorkerFailed
from benchmarks.engine.samples import AGAIN, FIGURES, OURS, Samples

IDLE_S = 30
START_S = 600  # vLLM compiles the model the first time
CUT_S, CUT_ONCE_S = 240, 90
SPARE_S = 60  # a worker looks at the time only when a token comes
FAR_BEHIND = 0.6  # × the best peer: below that, one round says enough

QUIRE = Peer(name=OURS, worker="quire", arguments=("{model}", "{weights}"), weights=WEIGHTS)


@dataclass(slots=True, kw_only=True)
class Rounds:
    samples: Samples
    model: Path
    home: Path
    weights: str
    logs: Path
    say: Say
    _workers: dict[str, Worker] = field(default_factory=dict)

    def run(
        self,
        peers: Sequence[Peer],
        workloads: Sequence[str],
        *,
        num_rounds: int,
        idle: bool,
        end: float,
    ) -> None:
        """No round begins that would end after ``end``, of time.monotonic()."""
        steady = [QUIRE, *(peer for peer in peers if not peer.once)]
        try:
            last_s = 0.0
            for turn in range(num_rounds):
                begun = time.monotonic()
                if begun + last_s > end:
                    self.say(f"Rounds from {turn + 1} on are left out: there is no time")
                    break
                for workload in workloads:
                    self._take_turns(steady, workload, turn)
                last_s = time.monotonic() - begun
            self._idle([peer.name for peer in steady] if idle else [])
            self._close()
            for peer in (peer for peer in peers if peer.once):
                for workload in (name for name in peer.workloads if name in workloads):
                    self._ask(peer, workload, 0, cut_s=CUT_ONCE_S)
                self._idle([peer.name] if idle else [])
                self._close()
        finally:
            self._close()

    def _take_turns(self, steady: Sequence[Peer], workload: str, turn: int) -> None:
        """Ours is first and last; every other round goes the other way about."""
        order = [(peer, peer.name) for peer in steady] + [(QUIRE, AGAIN)]
        for peer, name in order if turn % 2 == 0 else reversed(order):
            if not (peer is not QUIRE and self._is_far_behind(name, workload)):
                self._ask(peer, workload, turn, name=name)

    def _is_far_behind(self, engine: str, workload: str) -> bool:
        for figure in (figure for figure in FIGURES.values() if figure.workload == workload):
            best = self.samples.best_peer(figure)
            rates = self.samples.rates(figure, engine, cut=True).values()
            if best is None or not rates:
                return False
            most = statistics.median(self.samples.rates(figure, best).values())
            if statistics.median(rates) >= FAR_BEHIND * most:
                return False
        return True

    def _ask(
        self, peer: Peer, workload: str, turn: int, *, name: str = "", cut_s: float = CUT_S
    ) -> None:
        name = name or peer.name
        if self.samples.has(name, workload, turn) or peer.name in self.samples.of("refused"):
            return
        try:
            worker = self._worker(peer)
            answer = worker.ask(
                {"workload": workload, "limit_s": cut_s}, limit_s=2 * cut_s + SPARE_S
            )
        except WorkerFailed as error:
            self._workers.pop(peer.name, None)
            self.samples.add("refused", peer.name, reason=f"{workload}: {error}")
            self.say(f"{peer.name} failed in {workload}: {error}")
            return
        sample = {"workload": workload, "turn": turn, **answer}
        self.samples.add("sample", name, **sample)
        told = answer.get("error") or ", ".join(
            f"{figure.name} {figure.rate(sample):.1f}"
            for figure in FIGURES.values()
            if figure.workload == workload
        )
        self.say(f"round {turn + 1}, {name}: {told}; others {answer['others']:.0%}")

    def _worker(self, peer: Peer) -> Worker:
        """The engine's process, started if it is not there. Raises: WorkerFailed."""
        if peer.name not in self._workers:
            self.say(f"Loading {peer.name}")
            worker = Worker(
                peer.command(self.home, self.model, self.weights),
                peer.variables(self.home),
                self.logs / f"{peer.name}.log",
                limit_s=START_S,
            )
            self._workers[peer.name] = worker
            self.samples.add("about", peer.name, **worker.about)
        return self._workers[peer.name]

    def _idle(self, names: Sequence[str]) -> None:
        """What each holds after a while without requests."""
        waiting = {name: self._workers[name] for name in names if name in self._workers}
        for worker in waiting.values():
            worker.wake()
        time.sleep(IDLE_S if waiting else 0)
        for name, worker in waiting.items():
            self.samples.add("idle", name, bytes=worker.resident_bytes())

    def _close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
