"""Workers that time one case at a time, and the parent that asks them in turn.

The protocol, in which ours (quire_worker.py) and vLLM's (vllm_worker.py) answer alike.
One JSON object a line. A worker says first what it is:

    {"name": "vLLM", "version": "0.33.0"}

and then answers each command from its standard input with one line:

    {"case": "decode", "num_seqs": 256, "windows": [null], …, "repeats": 7}
    {"figures": {"allocate": [4312.5, …], "append": [601.3, …]}, "facts": {"blocks_per_cycle": 256}}
    {"error": "ValueError: …"}                       where the case failed or is not written yet

``figures`` holds one number for each repetition after a warm-up that is not reported; ``facts``
what both sides should agree on, so that different work shows. All figures are nanoseconds by
``perf_counter_ns``, with the garbage collector off, except those of ``metadata``. Input
is read to its end, then the worker leaves.

A window of ``null`` is full attention. A block has 16 tokens. The cases and their parameters:

``pool``      num_blocks, batch, caching: "off", "on" (no block has a key), "evicting" (every
              block has one, so each that is taken is first forgotten) or "scattered" (the same,
              and at first all were freed in random order), repeats. One repetition takes
              ``blocks_taken(…)`` blocks in batches, gives them new keys if "evicting" or
              "scattered" (not timed), then frees batch after batch.
              Figures a block: allocate, free. Facts: blocks, batches (a repetition).
``decode``    num_blocks (0: as many as are needed, one pool for all groups), num_seqs, windows
              (one a group), caching, prompt_tokens, rewind, repeats. One repetition is a cycle
              of 16 steps of one token; sequence i is i % 16 tokens further than the prompt, so in
              each step 1/16 of them cross a block's edge. ``rewind``: new sequences before each
              repetition, so that few blocks are enough.
              Figures a sequence and step: allocate (room for a token, in every group), append
              (the new token is known: full blocks get their hash). Facts: blocks_per_cycle
              (taken less given back).
``full_hit``  prompt_tokens, windows, repeats: a prompt that is cached whole.
              Figures a prompt token: hash (what keys cost when a request arrives), lookup, adopt
              (room for the whole prompt, hits included), free. Facts: hit_tokens.
``metadata``  num_blocks. Figures in bytes a block, as tracemalloc counts: unhashed (the pool as
              built), beside_key (every block cached, without the keys' own bytes), key. No facts.
              Ours adds the parts of these; a figure that one side lacks is shown without the other.

This module imports nothing but the standard library: the peer's environment runs it too.
"""

import gc
import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK_SIZE = 16
ANSWER_S = 300.0
Figures = dict[str, list[float]]
Answer = dict[str, Any]
CaseFunction = Callable[..., Answer]


# -- in a worker ---------------------------------------------------------------------------------


def blocks_taken(num_blocks: int, batch: int) -> int:
    """Blocks that one repetition of ``pool`` takes: a multiple of ``batch``.

    One block is left out because vLLM keeps one for itself.
    """
    most = min(num_blocks - 1, 8192)
    assert most >= batch, f"{num_blocks} blocks are too few for batches of {batch}"
    return most // batch * batch


def shuffled(count: int) -> list[int]:
    """0 … count - 1 in an order that is the same in every worker."""
    order = list(range(count))
    random.Random(0).shuffle(order)
    return order


def prompt(seq: int, num_tokens: int, vocabulary: int = 32_000) -> list[int]:
    """Token ids of a prompt that no other sequence shares, not even its first block."""
    own = [seq % vocabulary, seq // vocabulary]
    return own + [(seq * 7919 + j * 31) % vocabulary for j in range(2, num_tokens)]


def serve(name: str, version: str, cases: Mapping[str, CaseFunction]) -> None:
    """Answer commands until the input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    gc.collect()
    gc.freeze()  # what was imported: as servers do after start-up
    print(json.dumps({"name": name, "version": version}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = cases[command.pop("case")](**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        print(json.dumps(answer), file=answers)


# -- in the parent -------------------------------------------------------------------------------


class WorkerFailed(RuntimeError):
    """A worker ended, or did not answer in time; the message has the end of what it printed."""


class Worker:
    """One worker process. Asked in turn, never two at a time: the cores are shared."""

    def __init__(
        self, module: str, python: Path | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        self._child = subprocess.Popen(
            [str(python or sys.executable), "-m", f"benchmarks.accounting.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(env or os.environ),
            text=True,
        )
        said = self._read()
        self.name, self.version = str(said["name"]), str(said["version"])

    def ask(self, command: Mapping[str, Any]) -> Answer:
        assert self._child.stdin
        try:
            print(json.dumps(command), file=self._child.stdin, flush=True)
        except BrokenPipeError:
            raise WorkerFailed(self._last_words("has ended")) from None
        return self._read()

    def close(self) -> None:
        assert self._child.stdin
        assert self._child.stdout
        self._child.stdin.close()
        try:
            self._child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()
        self._errors.close()

    def _read(self) -> Answer:
        assert self._child.stdout
        ready, _, _ = select.select([self._child.stdout], [], [], ANSWER_S)
        line = self._child.stdout.readline() if ready else ""
        if not line:
            raise WorkerFailed(
                self._last_words("ended" if ready else f"silent for {ANSWER_S:.0f} s")
            )
        answer: Answer = json.loads(line)
        return answer

    def _last_words(self, why: str) -> str:
        self._child.kill()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()[-8:]
        return "\n".join([f"the worker {self._child.args!r} {why}", *said])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One command, and how its figures are spoken of."""

    letter: str  # of the table
    label: str
    command: Mapping[str, Any]
    claimed: bool = False  # asked with --quick too

    @property
    def key(self) -> str:
        return f"{self.letter}: {self.label}"


@dataclass(slots=True, kw_only=True)
class Samples:
    """Answers to one case: one entry a pair and side, each a list of repetitions by figure."""

    ours: list[Figures] = field(default_factory=list)
    twin: list[Figures] = field(default_factory=list)  # a second process of ours: the A/A pair
    peer: list[Figures] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)  # by side; a side that failed has no list
    facts: dict[str, Answer] = field(default_factory=dict)  # by side

    @property
    def agree(self) -> bool:
        """Whether all sides that answered did the same work, by their own word."""
        said = list(self.facts.values())
        return all(facts == said[0] for facts in said)

    @property
    def agree_but_for_longer_hits(self) -> bool:
        """Whether they differ only in that ours found more of a prompt than the peer."""
        ours, peer = self.facts.get("ours", {}), self.facts.get("peer", {})
        return (
            self.facts.get("twin", ours) == ours
            and ours.keys() == peer.keys() == {"hit_tokens"}
            and ours["hit_tokens"] >= peer["hit_tokens"]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of one case, over all pairs. None: that side has no samples."""

    ours: float | None  # median over pairs of the median over repetitions
    peer: float | None
    ours_least: float | None  # over all pairs and repetitions
    peer_least: float | None
    ratio: float | None  # ours / peer: median over pairs of the ratio of medians
    ratio_of_least: float | None
    noise: tuple[float, float, float] | None  # ours / ours: least, median, greatest over pairs


def run(
    cases: Sequence[Case],
    workers: Mapping[str, Worker],
    num_pairs: int,
    on_step: Callable[[int, Case], None],
) -> dict[str, Samples]:
    """Ask each side for each case once a pair, in turn; the other way round in every second pair.

    All cases of a pair come before the next pair, so that a slow minute of the machine falls on
    every case and side alike. ``on_step`` is told before each case.
    """
    samples = {case.key: Samples() for case in cases}
    for pair in range(num_pairs):
        for case in cases:
            on_step(pair, case)
            _ask_each(case, workers, samples[case.key], backwards=pair % 2 == 1)
    return samples


def _ask_each(
    case: Case, workers: Mapping[str, Worker], samples: Samples, *, backwards: bool
) -> None:
    for side in reversed(list(workers)) if backwards else list(workers):
        if side in samples.errors:
            continue
        try:
            answer = workers[side].ask(case.command)
        except WorkerFailed as error:
            answer = {"error": str(error)}
        answers: list[Figures] = getattr(samples, side)
        if "error" in answer:
            samples.errors[side] = answer["error"]
            samples.facts.pop(side, None)
            answers.clear()
        else:
            answers.append(answer["figures"])
            samples.facts[side] = answer.get("facts", {})


def compare(samples: Samples, *figures: str) -> Comparison:
    """One figure, or the sum of several that follow one another (repetition by repetition)."""
    ours, twin, peer = (
        [
            [sum(parts) for parts in zip(*(sample[name] for name in figures), strict=True)]
            for sample in side
            if sample.keys() >= set(figures)
        ]
        for side in (samples.ours, samples.twin, samples.peer)
    )
    least, peer_least = _least(ours), _least(peer)
    ratios, noise = _ratios(ours, peer), sorted(_ratios(ours, twin))
    return Comparison(
        ours=_median(ours),
        peer=_median(peer),
        ours_least=least,
        peer_least=peer_least,
        ratio=statistics.median(ratios) if ratios else None,
        ratio_of_least=least / peer_least if least is not None and peer_least else None,
        noise=(noise[0], statistics.median(noise), noise[-1]) if noise else None,
    )


def _median(pairs: Sequence[Sequence[float]]) -> float | None:
    return statistics.median(map(statistics.median, pairs)) if pairs else None


def _least(pairs: Sequence[Sequence[float]]) -> float | None:
    return min(map(min, pairs)) if pairs else None


def _ratios(some: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> list[float]:
    middles = zip(map(statistics.median, some), map(statistics.median, others), strict=False)
    return [one / other for one, other in middles if other > 0]
