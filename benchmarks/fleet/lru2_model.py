"""What a fleet's LRU-2 caches lose, and to what: a model of queues, in seconds a run.

    python -m benchmarks.fleet.lru2_model TRACES

Each replica computes one prompt after the other at a constant speed, then decodes, and holds the
blocks of each sequence to its end. A request goes where the fleet's placement would send it: by
computing and waiting, by where its beginning was sent before, and by what was computed where.
Events come at once, and the caches are LRU-2 from the beginning. Blocks are the trace's.

Each row changes one thing, and is compared with one cache and engine as large and as fast as all,
over several arrivals of the trace.
"""

import heapq
import math
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import mean, stdev
from typing import Annotated

import typer

from benchmarks.fleet.bench_placement import TRACE, arrivals
from benchmarks.harness.report import Run, Table
from quire.kv.shadow_caches import NEVER
from quire.traces import TraceRequest

TOKENS = 512  # of the trace's blocks
TOKENS_PER_S, STEP_S = 27_000.0, 0.02  # of a replica: prompts computed, and a step of decoding
CACHE_BLOCKS = 963  # of a replica: 493,000 tokens
REACH = 8  # cache sizes back that a use of an evicted block is remembered
WORK, FORMER, CROWDING, LEAST_CROWDING = 9.0, 4.0, 0.1, 0.125  # as ``placement`` weighs
EQUAL_FRACTION, EQUAL_S, STEP_TOKENS = 0.05, 0.001, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A fleet, and what is different from the real one."""

    num: int = 4
    blocks: int = CACHE_BLOCKS  # of each cache
    tokens_per_s: float = TOKENS_PER_S
    step_s: float = STEP_S
    holds: bool = True  # what runs
    by_last: bool = False  # LRU in place of LRU-2
    told: bool = False  # each cache knows when the others used a prompt's beginning
    stays: bool = False  # a conversation never leaves its replica
    pushed: float = 0.0  # how much what is pushed out weighs, of computing it

    def one(self, *, side_by_side: bool = False) -> "Setting":
        """Return one cache as large as all, and an engine as fast as all, or engines like these."""
        step_s = self.step_s if side_by_side else self.step_s / self.num
        return replace(
            self,
            num=1,
            blocks=self.num * self.blocks,
            tokens_per_s=self.num * self.tokens_per_s,
            step_s=step_s,
        )


class LastButOne:
    """An LRU-2 cache (or LRU) whose running sequences hold their blocks."""

    def __init__(self, setting: Setting) -> None:
        self.size, self._by_last = setting.blocks, setting.by_last
        self.clock = 0  # blocks computed
        self.reach = REACH * setting.blocks
        self.num_held = 0
        self._holders: dict[int, int] = {}  # of each block that is there
        self._last: dict[int, int] = {}  # use of each block, also of evicted ones
        self._before: dict[int, int] = {}  # … and the use before that, of those that are there
        self._entry: dict[int, int] = {}  # what is free → serial of its valid entry
        self._heap: list[tuple[int, int, int]] = []  # score, serial, block
        self._serial = 0
        self._num_again = 0  # free blocks that were used more than once

    def num_found(self, ids: tuple[int, ...]) -> int:
        for number, block in enumerate(ids):
            if block not in self._holders:
                return number
        return len(ids)

    def num_pushed_out(self, count: int) -> int:
        """Return how many blocks that were used again so many new ones would push out."""
        return max(0, count - (self.size - self.num_held - self._num_again))

    def begin(self, ids: tuple[int, ...], num_besides: int) -> None:
        """Hold a sequence's blocks, and so many that no prompt finds."""
        for block in ids:
            holders = self._holders.get(block)
            if holders is None:
                self.clock += 1
            elif not holders:
                del self._entry[block]
                self._num_again -= self._before[block] != NEVER
            self.num_held += not holders
            self._holders[block] = (holders or 0) + 1
        self.clock += num_besides
        self.num_held += num_besides
        excess = self.num_held + len(self._entry) - self.size
        while excess > 0 and self._heap:
            _, serial, block = heapq.heappop(self._heap)
            if self._entry.get(block) == serial:
                self._num_again -= self._before.pop(block) != NEVER
                del self._entry[block], self._holders[block]
                excess -= 1

    def end(
        self, ids: tuple[int, ...], num_besides: int, told: tuple[int, int] = (NEVER, 0)
    ) -> None:
        """Let a sequence's blocks go; ``told``: another's use of the first so many of them."""
        self.num_held -= num_besides
        before, oldest = NEVER, self.clock - self.reach
        for place in range(len(ids) - 1, -1, -1):
            block = ids[place]
            last = self._last.get(block, NEVER)
            if last > before and (last >= oldest or block in self._before):
                before = last
            if place < told[1]:
                before = max(before, told[0])
            self._before[block], self._last[block] = before, self.clock
            self._holders[block] -= 1
            if not self._holders[block]:
                self.num_held -= 1
                self._num_again += before != NEVER
                self._serial += 1
                self._entry[block] = self._serial
                score = self.clock if self._by_last else before
                heapq.heappush(self._heap, (score, self._serial, block))


class _Door:
    """What placement remembers of where prompts were sent."""

    def __init__(self, num: int) -> None:
        self.new_tokens = [0.0] * num  # computed lately
        self._lengths = [1]  # of beginnings, in blocks of 128 tokens, each longer by a half
        self._former: dict[tuple[int, int], int] = {}
        self.last: dict[int, tuple[float, int]] = {}  # block → when by the fleet's clock, and where
        self.clock = 0.0  # blocks computed, in the mean of the replicas

    def marks(self, ids: tuple[int, ...]) -> list[tuple[int, int]]:
        most = 4 * len(ids)
        while self._lengths[-1] < most:
            self._lengths.append(self._lengths[-1] * 3 // 2 + 1)
        return [(each, ids[(each - 1) // 4]) for each in self._lengths if each <= most]

    def weights(
        self, marks: list[tuple[int, int]], hits: list[int], num_prompt_tokens: int
    ) -> list[float]:
        """Return what computing weighs at each replica, which has so many tokens of the prompt."""
        former = {self._former[each]: 128 * each[0] for each in marks if each in self._former}
        mean_new = mean(self.new_tokens)
        found = []
        for at, (hit, new) in enumerate(zip(hits, self.new_tokens, strict=True)):
            weight = WORK - FORMER * max(0, former.get(at, 0) - hit) / num_prompt_tokens
            if mean_new:
                weight *= 1 + CROWDING * math.log(new / mean_new + LEAST_CROWDING)
            found.append(weight)
        return found

    def note(self, place: int, marks: list[tuple[int, int]], computed: float, held: float) -> None:
        self._former |= dict.fromkeys(marks, place)
        if held:
            self.new_tokens = [each * held / (held + computed) for each in self.new_tokens]
            self.new_tokens[place] += computed

    def elsewhere(self, ids: tuple[int, ...], place: int, cache: LastButOne) -> tuple[int, int]:
        """Return when another replica had a prompt's beginning last, and how much of it."""
        for length in range(len(ids), 0, -1):
            at, where = self.last.get(ids[length - 1], (0.0, place))
            if where != place:
                age = int(self.clock - at)
                if age <= cache.reach:
                    return max(0, cache.clock - age), length
                break
        return NEVER, 0


def _costs(
    setting: Setting,
    prompt: int,
    hits: list[int],
    waits_s: list[float],
    num_running: list[int],
    weights: list[float],
    pushed: list[int],
) -> list[tuple[float, float]]:
    """Return the cost of each replica, and the seconds to the end of the prompt there."""
    found = []
    for at, hit in enumerate(hits):
        compute_s, wait_s = (prompt - hit) / setting.tokens_per_s, waits_s[at]
        steps = math.ceil((compute_s + wait_s) * setting.tokens_per_s / STEP_TOKENS)
        if num_running[at]:
            wait_s += steps * setting.step_s / 2
        cost_s = weights[at] * compute_s + wait_s
        cost_s += setting.pushed * WORK * pushed[at] * TOKENS / setting.tokens_per_s
        found.append((cost_s, compute_s + wait_s))
    return found


def play(trace: list[TraceRequest], setting: Setting) -> tuple[float, float, float]:
    """Play a trace. Returns: the shares of tokens found, and of caches held; seconds of waiting."""
    num, tokens_per_s = setting.num, setting.tokens_per_s
    caches = [LastButOne(setting) for _ in range(num)]
    door, draw = _Door(num), Random(0).random
    free_s, num_running = [0.0] * num, [0] * num
    running: list[tuple[float, int, int, tuple[int, ...], int, tuple[int, int]]] = []
    asked = found = 0
    held = waited_s = 0.0
    for number, request in enumerate(trace):
        while running and running[0][0] <= request.at_s:
            _, _, place, ids, besides, told = heapq.heappop(running)
            caches[place].end(ids, besides, told)
            num_running[place] -= 1
        prompt = request.input_tokens
        ids = tuple(request.hash_ids[: prompt // TOKENS])
        besides = 1 + request.output_tokens // TOKENS
        hits = [min(TOKENS * cache.num_found(ids), prompt - 1) for cache in caches]
        marks = door.marks(ids)
        waits_s = [max(0.0, each - request.at_s) for each in free_s]
        weights = door.weights(marks, hits, prompt)
        pushed = [
            cache.num_pushed_out(len(ids) - hit // TOKENS + besides)
            for cache, hit in zip(caches, hits, strict=True)
        ]
        costs = _costs(setting, prompt, hits, waits_s, num_running, weights, pushed)
        least = min(costs)
        equal = least[0] + EQUAL_FRACTION * least[1] + EQUAL_S
        fits = [at for at in range(num) if costs[at][0] <= equal]
        place = min(fits, key=lambda at: (num_running[at], draw()))
        if setting.stays and (known := [each for each in ids[4:] if each in door.last]):
            place = door.last[known[-1]][1]
        told = door.elsewhere(ids, place, caches[place]) if setting.told else (NEVER, 0)
        computed = prompt - hits[place]
        door.note(place, marks, computed, num * setting.blocks * TOKENS)
        door.clock += (computed / TOKENS + besides) / num
        door.last |= dict.fromkeys(ids, (door.clock, place))
        asked, found = asked + prompt, found + hits[place]
        begun_s = max(free_s[place], request.at_s)
        waited_s += begun_s - request.at_s
        free_s[place] = begun_s + computed / tokens_per_s
        caches[place].begin(ids, besides)
        num_running[place] += 1
        end_s = free_s[place] + request.output_tokens * setting.step_s if setting.holds else 0.0
        heapq.heappush(running, (end_s, number, place, ids, besides, told))
        held += sum(cache.num_held for cache in caches) / (num * setting.blocks)
    return found / asked, held / len(trace), waited_s / len(trace)


def main(
    traces: Annotated[Path, typer.Argument(help=f"Folder with {TRACE}.")],
    num: Annotated[int, typer.Option("--replicas", help="Of the fleet.")] = 4,
    memory: Annotated[float, typer.Option(help="Factor for each replica's cache.")] = 1.0,
    num_requests: Annotated[int, typer.Option(help="Of the trace.")] = 12_031,
    num_skipped: Annotated[int, typer.Option(help="Requests before these.")] = 0,
    num_arrivals: Annotated[int, typer.Option(help="The trace's own, and moved ones.")] = 8,
) -> None:
    """Print what a fleet finds, as a share of what one cache and engine find, in variants."""
    run = Run("fleet.lru2_model", width=140)
    fleet = Setting(num=num, blocks=int(memory * CACHE_BLOCKS))
    came = [
        arrivals(traces / TRACE, num_requests, seed, num_skipped=num_skipped)
        for seed in range(num_arrivals)
    ]
    by_one: dict[Setting, list[float]] = {}
    rows = []
    for what, setting in (
        ("the fleet, as it is", fleet),
        ("one cache, engines side by side", fleet.one(side_by_side=True)),
        ("a conversation never leaves its replica", replace(fleet, stays=True)),
        ("told of a prompt's history", replace(fleet, told=True)),
        *(
            (f"what is pushed out weighs {each:g}", replace(fleet, pushed=each))
            for each in (0.1, 0.2, 0.3, 0.5)
        ),
        ("told, and 0.3", replace(fleet, told=True, pushed=0.3)),
        ("LRU, as it is", replace(fleet, by_last=True)),
        ("nothing is held, as it is", replace(fleet, holds=False)),
        ("nothing is held, and 0.3", replace(fleet, holds=False, pushed=0.3)),
    ):
        run.say(what)
        one = replace(fleet.one(), by_last=setting.by_last, holds=setting.holds)
        if one not in by_one:
            by_one[one] = [play(each, one)[0] for each in came]
        found, wholes = [play(each, setting) for each in came], by_one[one]
        shares = [each[0] / whole for each, whole in zip(found, wholes, strict=True)]
        rows.append(
            [
                what,
                f"{mean(wholes):.2%}",
                f"{mean(each[0] for each in found):.2%}",
                f"{mean(shares):.3f}",
                f"{stdev(shares):.3f}" if len(shares) > 1 else "",
                f"{min(shares):.3f}",
                f"{mean(each[1] for each in found):.1%}",
                f"{mean(each[2] for each in found):.2f}",
            ]
        )
    columns = ("", "one finds", "found", "of one", "deviation", "least", "held", "waiting, s")
    title = f"{num} LRU-2 caches, {num_requests:,} requests, {num_arrivals} arrivals"
    run.end([Table(title=title, columns=columns, rows=rows)], run.setting(" …"))


if __name__ == "__main__":
    typer.run(main)
