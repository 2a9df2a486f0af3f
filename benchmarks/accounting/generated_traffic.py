"""Traffic that is made up, of kinds that a prefix cache meets: scans, loops, phases, drifts, turns.

A prompt is a list of blocks, as numbers. Each kind is drawn from a generator of numbers, so that a
seed names it.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from quire.planner.hit_rates import Prompts, prompts_of
from quire.traces import TraceRequest

Prompt: TypeAlias = list[int]
NUM_PROMPTS = 6_000


def as_prompts(chains: Iterable[Prompt]) -> Prompts:
    """Make a trace of prompts, one token a block."""
    return prompts_of(
        TraceRequest(
            at_s=0, input_tokens=len(ids), output_tokens=1, hash_ids=tuple(ids), id_tokens=1
        )
        for ids in chains
    )


class _NewBlocks:
    """Blocks that nothing else has."""

    def __init__(self) -> None:
        self._next = count()

    def take(self, number: int) -> Prompt:
        return [next(self._next) for _ in range(number)]

    def documents(self, rng: np.random.Generator, number: int) -> list[Prompt]:
        return [self.take(int(rng.integers(5, 40))) for _ in range(number)]


def _by_rank(rng: np.random.Generator, number: int, power: float, size: int) -> list[int]:
    """Draw places, of which the n-th is drawn in proportion to n^-power."""
    weights = np.arange(1, number + 1) ** -power
    places: list[int] = rng.choice(number, size, p=weights / weights.sum()).tolist()
    return places


def circle(num_blocks: int, rounds: int) -> list[Prompt]:
    """Read blocks 22 at a time, round and round."""
    chains: list[Prompt] = np.arange(num_blocks).reshape(-1, 22).tolist()
    return chains * rounds


def _circle(rng: np.random.Generator, size: int) -> list[Prompt]:
    return circle(4_400, size // 200 + 1)[:size]


def _circle_with_noise(rng: np.random.Generator, size: int) -> list[Prompt]:
    blocks = _NewBlocks()
    documents = [blocks.take(22) for _ in range(300)]
    found, at = list[Prompt](), 0
    while len(found) < size:
        if rng.random() < 0.3:
            found.append(blocks.take(int(rng.integers(5, 40))))
        else:
            found.append(documents[at % len(documents)])
            at += 1
    return found


def _twice(gap: float) -> "Kind":
    """Have each document come twice, after so many others on average."""

    def kind(rng: np.random.Generator, size: int) -> list[Prompt]:
        blocks, events = _NewBlocks(), list[tuple[float, Prompt]]()
        for number in range(size // 2):
            document = blocks.take(int(rng.integers(8, 40)))
            again = 2 * number + 1 + float(rng.exponential(gap))
            events += [(2 * number, document), (again, document)]
        return [document for _, document in sorted(events, key=lambda event: event[0])]

    return kind


def _popular(rng: np.random.Generator, size: int) -> list[Prompt]:
    documents = _NewBlocks().documents(rng, 2_000)
    return [documents[place] for place in _by_rank(rng, len(documents), 0.8, size)]


def _scans(rng: np.random.Generator, size: int) -> list[Prompt]:
    """Have documents that are asked about, and now and then many that are read once."""
    blocks = _NewBlocks()
    hot, found = blocks.documents(rng, 100), list[Prompt]()
    while len(found) < size:
        if rng.random() < 0.02:
            found += blocks.documents(rng, int(rng.integers(50, 200)))
        [place] = _by_rank(rng, len(hot), 1.0, 1)
        found.append(hot[place] + blocks.take(int(rng.integers(1, 4))))
    return found[:size]


def _drift(rng: np.random.Generator, size: int) -> list[Prompt]:
    documents = _NewBlocks().documents(rng, 1_200)
    centers = np.arange(size) * (len(documents) - 100) // size
    places = centers + np.abs(rng.normal(0, 40, size)).astype(int)
    return [documents[place % len(documents)] for place in places.tolist()]


def _conversations(ends: float) -> "Kind":
    """Have conversations go on, of which so large a part ends with each turn."""

    def kind(rng: np.random.Generator, size: int) -> list[Prompt]:
        blocks, live, found = _NewBlocks(), list[Prompt](), list[Prompt]()
        systems = [blocks.take(10) for _ in range(5)]
        while len(found) < size:
            if len(live) < 60 or rng.random() < 0.2:
                live.append(systems[rng.integers(5)] + blocks.take(int(rng.integers(3, 30))))
            place = int(rng.integers(len(live)))
            if rng.random() < 0.5:  # one of the latest
                place = len(live) - 1 - min(len(live) - 1, int(rng.geometric(0.1)))
            live[place] = live[place] + blocks.take(int(rng.integers(1, 6)))
            found.append(live[place])
            if rng.random() < ends:
                live.pop(place)
        return found

    return kind


def _turns(rng: np.random.Generator, size: int) -> list[Prompt]:
    """Have recent prompts come back for a while, then old ones: the orders are right in turn."""
    blocks = _NewBlocks()
    old, found = [blocks.take(20) for _ in range(300)], list[Prompt]()
    while len(found) < size:
        recent = [blocks.take(20) for _ in range(40)]
        found += [recent[rng.integers(40)] for _ in range(200)]
        found += [
            old[rng.integers(300)] if rng.random() < 0.5 else blocks.take(20) for _ in range(200)
        ]
    return found[:size]


def _phases(rng: np.random.Generator, size: int) -> list[Prompt]:
    found, first = list[Prompt](), 0
    kinds = (_conversations(0.25), _circle, _twice(150), _scans, _drift, _conversations(0.25))
    for kind in kinds:
        part = kind(rng, size // len(kinds))
        found += [[block + first for block in chain] for chain in part]
        first = 1 + max(max(chain) for chain in found)
    return found


Kind: TypeAlias = Callable[[np.random.Generator, int], list[Prompt]]
KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "scans": _scans,
        "a circle": _circle,
        "a circle with noise": _circle_with_noise,
        "phases": _phases,
        "a drift": _drift,
        "turns of old and new": _turns,
        "popular documents": _popular,
        "each twice, soon": _twice(40),
        "each twice": _twice(150),
        "each twice, late": _twice(600),
        "conversations": _conversations(0.25),
        "long conversations": _conversations(0.05),
    }
)


def generated_kind(name: str, seed: int) -> Prompts:
    """Return traffic of one kind."""
    return as_prompts(KINDS[name](np.random.default_rng(seed), NUM_PROMPTS))


def generated(seed: int) -> Iterable[tuple[str, Prompts]]:
    """Yield each kind's name and its traffic."""
    for name in KINDS:
        yield name, generated_kind(name, seed)
