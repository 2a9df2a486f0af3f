"""What a plan of the scheduler costs: for a newcomer, for those that wait, and for equal prefixes.

No model and no tensor: the real scheduler over the paged accounting. Times are the processor's, so
that other programs disturb them less.
"""

from collections.abc import Iterable
from statistics import median
from time import process_time
from typing import Annotated, Any

import typer

from benchmarks.harness.quiet import no_collection
from benchmarks.harness.report import Output, Run, Table, WithClaims
from quire.engine.scheduler import Scheduler, SchedulerLimits
from quire.engine.sequence import Request, Sequence
from quire.engine.step_plan import Sampled
from quire.kv import STRATEGIES, CacheConfig
from quire.sampling_params import SamplingParams
from quire.spec import FullAttention, Group

BLOCK, MAX_MODEL_LEN = 16, 8192
PROMPT, OUTPUT = 20, 400  # tokens
FULL = Group(spec=FullAttention(num_kv_heads=1, head_dim=16, dtype="bfloat16"), layers=(0,))
RUNNING = (256, 2048, 16_384)
NEWCOMERS, WAITING = 512, 1000
BURSTS = ((4, 400, 0), (16, 4000, 20), (64, 512, 16), (256, 512, 16))
GOAL_US, GOAL_GROWTH, GOAL_WAITING, GOAL_TOKENS = 60.0, 1.5, 1.1, 1.05


class Crowd:
    """A scheduler, and sequences that no two of which begin alike."""

    def __init__(self, num_blocks: int, *, max_num_seqs: int, budget: int = 10**8) -> None:
        config = CacheConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            capacity_bytes=num_blocks * BLOCK * FULL.bytes_per_token,
            block_size=BLOCK,
            page_bytes=BLOCK * FULL.bytes_per_token,
        )
        limits = SchedulerLimits(
            max_model_len=MAX_MODEL_LEN, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        self.accounting = STRATEGIES["paged"].make_accounting((FULL,), config)
        self.scheduler = Scheduler(self.accounting, limits)
        self.sequences: list[Sequence] = []
        self._num_added = 0

    def add(self, count: int) -> None:
        for _ in range(count):
            first = self._num_added * 2 * PROMPT
            self.ask(range(first, first + PROMPT), OUTPUT)

    def ask(self, tokens: Iterable[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens)
        self.sequences += self.scheduler.add(
            Request(request_id=self._num_added, prompt_token_ids=tuple(tokens), params=params)
        )
        self._num_added += 1

    def step(self) -> tuple[float, int]:
        """Seconds of the plan, and its tokens."""
        begun = process_time()
        plan = self.scheduler.plan()
        seconds = process_time() - begun
        self.accounting.drain()
        self.scheduler.update(plan, [Sampled(token_ids=(7,)) for _ in plan.draws])
        self.accounting.drain()
        return seconds, plan.num_tokens


def newcomer_us(num_running: int, rounds: int) -> list[float]:
    """Each sample: a plan with some newcomers less one without, by newcomer."""
    seats = num_running + NEWCOMERS
    # Less than all may come to take, so that what is expected decides; and enough for that.
    crowd = Crowd(24 * seats, max_num_seqs=seats)
    crowd.add(num_running)
    crowd.step()
    found = []
    for _ in range(rounds):
        without = median(crowd.step()[0] for _ in range(3))
        crowd.add(NEWCOMERS)
        seconds, _ = crowd.step()
        assert crowd.scheduler.num_running == seats, "they were not admitted"
        found.append((seconds - without) / NEWCOMERS * 1e6)
        for sequence in crowd.sequences[-NEWCOMERS:]:
            crowd.scheduler.finish(sequence, "abort")
    return found


def waiting_ratio(num_running: int, rounds: int) -> list[float]:
    """Each sample: a plan while some wait for memory, by one of the same size with none."""
    pair = []
    for num_waiting in (0, WAITING):
        crowd = Crowd(4 * num_running, max_num_seqs=2 * num_running + WAITING)
        crowd.add(num_running)
        while crowd.step()[1] > crowd.scheduler.num_running:
            pass
        if num_waiting:
            crowd.add(num_waiting)
        else:  # those that do not fit are not wanted here
            for sequence in crowd.sequences:
                if not sequence.num_computed_tokens:
                    crowd.scheduler.finish(sequence, "abort")
        crowd.step()
        pair.append(crowd)
    none, some = pair
    assert some.scheduler.num_waiting >= WAITING
    ratios = []
    for _ in range(rounds):
        alone, beside = none.step()[0], some.step()[0]
        ratios.append(beside / alone)
    assert none.scheduler.num_running == some.scheduler.num_running
    return ratios


def burst(count: int, num_shared: int, num_own: int) -> tuple[int, int]:
    """Tokens of the prompts that are computed, and steps until all are."""
    crowd = Crowd(40_000, max_num_seqs=count, budget=2048)
    for n in range(count):
        first = 100_000 * (n + 1)
        crowd.ask([*range(num_shared), *range(first, first + num_own)], 1)
    total = num_steps = 0
    while crowd.scheduler.has_unfinished:
        total, num_steps = total + crowd.step()[1], num_steps + 1
    return total, num_steps


def main(
    with_claims: WithClaims = False,
    rounds: Annotated[int, typer.Option(min=1)] = 7,
    output: Output = None,
) -> None:
    """Microseconds a newcomer, plans beside those that wait, and tokens of equal prefixes."""
    run = Run("accounting.bench_scheduler", width=150)
    with no_collection():
        newcomers = {n: newcomer_us(n, rounds) for n in RUNNING}
        ratios = {n: waiting_ratio(n, rounds) for n in RUNNING[:2]}
    bursts = {sizes: burst(*sizes) for sizes in BURSTS}
    of_bursts = [
        [f"{n} × ({shared:,} + {own})", f"{total:,}", f"{_distinct(n, shared, own):,}", f"{steps}"]
        for (n, shared, own), (total, steps) in bursts.items()
    ]
    tables = (
        ("A. Admission", ("running", "µs a newcomer"), _rows(newcomers, 0)),
        (
            "B. Those that wait",
            ("running", "plan with 1,000 waiting / with none"),
            _rows(ratios, 2),
        ),
        ("C. Equal prefixes", ("burst", "computed", "distinct", "steps"), of_bursts),
    )
    shown = [Table(title=title, columns=names, rows=rows) for title, names, rows in tables]
    run.end(
        shown,
        run.setting("", also=[f"{rounds} rounds"]),
        claims=_claims(newcomers, ratios, bursts) if with_claims else (),
        output=output,
    )


def _claims(
    newcomers: dict[int, list[float]],
    ratios: dict[int, list[float]],
    bursts: dict[tuple[int, int, int], tuple[int, int]],
) -> Iterable[dict[str, Any]]:
    least, most = median(newcomers[RUNNING[0]]), median(newcomers[RUNNING[-1]])
    worst = max(median(several) for several in ratios.values())
    tokens = max(total / _distinct(*sizes) for sizes, (total, _) in bursts.items())
    for name, ours, peer, unit, goal in (
        ("a newcomer beside 256", least, None, "µs", GOAL_US),
        ("a newcomer beside 16,384, by one beside 256", most, least, "µs", GOAL_GROWTH),
        ("a plan with 1,000 waiting, by one with none", worst, None, "×", GOAL_WAITING),
        ("tokens computed in a burst, by distinct ones", tokens, None, "×", GOAL_TOKENS),
    ):
        value = ours if peer is None else ours / peer
        claim: dict[str, Any] = {"claim": name, "ours": ours, "peer": peer, "unit": unit}
        yield claim | {"ratio": value, "goal": f"≤ {goal}", "holds": value <= goal}


def _distinct(count: int, num_shared: int, num_own: int) -> int:
    """The last token of each prompt is computed in any case."""
    return num_shared + (count * num_own or count - 1)


def _rows(samples: dict[int, list[float]], digits: int) -> list[list[str]]:
    return [[f"{n:,}", _spread(several, digits)] for n, several in samples.items()]


def _spread(several: list[float], digits: int) -> str:
    return f"{median(several):.{digits}f} ({min(several):.{digits}f} … {max(several):.{digits}f})"


if __name__ == "__main__":
    typer.run(main)
