"""How far a sequence's blocks lie side by side: the share of neighbours in block tables.

Two blocks that stand one after the other in a table are *neighbours* if their ids do, too. A
processor's prefetcher then goes on from one to the next. Two kinds of use are played. For each are
printed the share of neighbours, the mean length of a run, and what it cost: pages that storage has
to commit for a block that is taken, and tokens found in the cache.

    python -m benchmarks.accounting.block_runs

``together``  prompts of 100 to 900 tokens in a fresh pool, then 500 tokens each
``churn``     such sequences come and go, so that about so much of the pool is held; with caching
              on, the rest is cached, and half of the prompts begin with the text of a sequence that
              has ended

``addresses`` is the space for ids, in pools: the budget of bytes is the same.
"""

from collections import Counter
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from benchmarks.harness.report import Table, markdown
from quire.kv import (
    DEFAULT_POLICY,
    EVICTION_POLICIES,
    FITS,
    BlockCoordinator,
    Commit,
    PoolSize,
    Release,
)
from quire.spec import FullAttention, Group

BLOCK_SIZE = 16
COLUMNS = ("case", "addresses", "neighbours", "mean run", "commits a block", "found")
Tokens = npt.NDArray[np.int32]


class Use:
    """A pool with sequences that run, and what has been seen of it."""

    def __init__(
        self, num_blocks: int, addresses: float, granule: int, seed: int, *, caching: bool
    ) -> None:
        spec = FullAttention(num_kv_heads=1, head_dim=1, dtype="float8_e4m3fn")
        block_bytes = BLOCK_SIZE * spec.bytes_per_token
        self.num_blocks = num_blocks
        self.blocks = BlockCoordinator(
            (Group(spec=spec, layers=(0,)),),
            [
                PoolSize(
                    block_bytes=block_bytes,
                    num_blocks=num_blocks // granule * granule,
                    spare_blocks=int(num_blocks * (addresses - 1)) // granule * granule,
                    granule_blocks=granule,
                    slots=BLOCK_SIZE,
                )
            ],
            block_size=BLOCK_SIZE,
            capacity_bytes=num_blocks * block_bytes,
            make_policy=EVICTION_POLICIES[DEFAULT_POLICY],
            caching=caching,
        )
        self.caching = caching
        self.random = np.random.default_rng(seed)
        self.tokens: dict[int, Tokens] = {}  # of running ones
        self.left: dict[int, int] = {}  # tokens to come
        self.past: list[Tokens] = []  # of some that have ended
        self.seen: Counter[str] = Counter()

    def prompt(self) -> Tokens:
        length = int(self.random.integers(100, 900))
        fresh = self.random.integers(0, 2**31, length, np.int32)
        if not self.caching or not self.past or self.random.random() < 0.5:
            return fresh
        old = self.past.pop(int(self.random.integers(len(self.past))))
        return np.concatenate([old, fresh[: length // 4]])

    def start(self, seq_id: int, num_more: int) -> bool:
        prompt = self.prompt()
        self.blocks.add(seq_id)
        hit = self.blocks.match_prefix(seq_id, prompt)
        if self.blocks.allocate(seq_id, len(prompt), hit=hit) is not FITS:
            self.blocks.free(seq_id)
            return False
        new = prompt[hit.num_tokens :]
        self.blocks.mark_computed([seq_id], [len(new)], new)
        self.seen["asked"] += len(prompt)
        self.seen["found"] += hit.num_tokens
        self.seen["taken"] += -(-len(new) // BLOCK_SIZE)
        self.tokens[seq_id], self.left[seq_id] = prompt, num_more
        return True

    def step(self) -> None:
        """A token more for each; the youngest gives way where there is no room."""
        while True:
            seq_ids = list(self.tokens)
            lengths = np.array([len(self.tokens[seq_id]) for seq_id in seq_ids])
            if self.blocks.try_extend_each(seq_ids, lengths + 1) == len(seq_ids):
                break
            self.end(seq_ids[-1])
        self.seen["taken"] += int((lengths % BLOCK_SIZE == 0).sum())
        new = self.random.integers(0, 2**31, len(seq_ids), np.int32)
        self.blocks.mark_computed(seq_ids, None, new)
        for seq_id, token in zip(seq_ids, new, strict=True):
            self.tokens[seq_id] = np.append(self.tokens[seq_id], token)
            self.left[seq_id] -= 1
            if not self.left[seq_id]:
                self.end(seq_id)
        for change in self.blocks.pools.changes:
            if isinstance(change, Commit | Release):
                self.seen[type(change).__name__] += change.stop - change.start
        self.blocks.pools.changes = []

    def end(self, seq_id: int) -> None:
        self.blocks.free(seq_id)
        self.past = [*self.past[-63:], self.tokens.pop(seq_id)]
        del self.left[seq_id]

    def look(self) -> None:
        """Count pairs in the tables."""
        for row in self.blocks.tables.rows.values():
            steps = np.diff(self.blocks.tables.held(0, row))
            self.seen["pairs"] += len(steps)
            self.seen["neighbours"] += int((steps == 1).sum())
            self.seen["sequences"] += 1

    @property
    def held_fraction(self) -> float:
        return self.blocks.pools[0].num_held / self.num_blocks


def together(use: Use, num_seqs: int) -> None:
    for seq_id in range(num_seqs):
        assert use.start(seq_id, 501)
    for _ in range(500):
        use.step()
    use.look()


def churn(use: Use, num_steps: int, held: float) -> None:
    next_id = 0
    for step in range(num_steps):
        if step == num_steps // 3:
            use.seen.clear()  # it has filled up
        while use.held_fraction < held and use.start(next_id, int(use.random.integers(16, 500))):
            next_id += 1
        use.step()
        if step % 50 == 0:
            use.look()


def row(label: str, addresses: float, use: Use) -> list[str]:
    seen = use.seen
    blocks = seen["pairs"] + seen["sequences"]
    return [
        label,
        f"{addresses:g} ×",
        f"{seen['neighbours'] / seen['pairs']:.1%}",
        f"{blocks / (blocks - seen['neighbours']):.1f}",
        f"{seen['Commit'] / BLOCK_SIZE / seen['taken']:.2f}",
        f"{seen['found'] / seen['asked']:.1%}",
    ]


def main(
    steps: Annotated[int, typer.Option(help="Steps of each churn.")] = 3000,
    granule: Annotated[int, typer.Option(help="Blocks that fill whole pages.")] = 1,
    seed: int = 0,
) -> None:
    """Print the table."""
    rows = []
    for num_seqs in (16, 64):
        for addresses in (1.0, 4.0):
            use = Use(70 * num_seqs, addresses, granule, seed, caching=True)
            together(use, num_seqs)
            use.blocks.check()
            rows.append(row(f"together, {num_seqs} sequences", addresses, use))
    for caching, held in ((True, 0.9), (True, 0.5), (False, 0.9)):
        for addresses in (1.0, 1.25, 2.0):
            use = Use(2800, addresses, granule, seed, caching=caching)
            churn(use, steps, held)
            use.blocks.check()
            label = f"churn, {held:.0%} held, caching {'on' if caching else 'off'}"
            rows.append(row(label, addresses, use))
    flags = f"--steps {steps} --granule {granule} --seed {seed}"
    setting = f"`python -m benchmarks.accounting.block_runs {flags}`"
    table = Table(title="Neighbours in block tables", columns=COLUMNS, rows=rows)
    print(markdown([table], [], setting))


if __name__ == "__main__":
    typer.run(main)
