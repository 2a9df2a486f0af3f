"""A whole engine from a seed: a model that reads back what was kept, its own clock, and faults.

``World(seed).run()`` builds an engine with random options over real storage, sends it random
requests and disturbs it: steps that fail before or after they have written, sequences that can
never be computed, logits that are no numbers, pages that the system refuses, a machine that runs
out of memory, a capacity that is changed, clients that go away. Only the forward pass is a
stand-in: ``ReadingRunner`` writes each token with its position into its slots, reads all that a
query may read, and demands that it is what the sequence has there. Its logits are a function of
what it has read.

What must hold: every sequence that nobody ended gets the tokens that it gets alone; the others get
a beginning of them; each token is reported once; and at the end every block is free.
"""

import random
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from conformance.strategy_cases import OPTIONS
from quire.engine.cache_lock import CacheLock
from quire.engine.elastic import Elastic
from quire.engine.engine import Engine
from quire.engine.kv_cache import KVCache
from quire.engine.params import SamplingParams
from quire.engine.plan import Chunk, StepPlan
from quire.engine.sampling import Sampler
from quire.engine.scheduler import Drafts, Limits, Scheduler
from quire.engine.scheduling.costs import Costs
from quire.engine.scheduling.policy import POLICIES
from quire.engine.scheduling.swap import SwapSpace
from quire.engine.sequence import Request, Sequence
from quire.engine.swap.mover import ShelfMover
from quire.engine.swap.shelves import MemoryShelf
from quire.engine.swap.store import SwapStore
from quire.engine.swap.timers import HostTimer
from quire.errors import RequestTooLong
from quire.memory import FailingMemory, HostMemory
from quire.memory.governor import Governor
from quire.memory.machine.readings import MemoryReading
from quire.memory.residency import HostResident
from quire.spec import FullAttention, Layer, ModelSpec, SlidingWindow
from quire.strategies import Accounting, CacheConfig, Storage, build_accounting, build_storage

VOCAB, EOS = 32, 0
POISON, NO_NUMBER = 31, 30  # a prompt with such a token: its step fails, its logits are NaN
LONGEST = 48
WINDOW = 9
FULL = FullAttention(num_kv_heads=2, head_dim=64, dtype="float32")
SLIDING = SlidingWindow(num_kv_heads=1, head_dim=64, dtype="float32", window=WINDOW)
TOKEN_BYTES = {"full": 1024, "hybrid": 1536}
SPECS = {"full": (FULL,), "hybrid": (FULL, SLIDING)}


def logits_of(tokens: tuple[int, ...]) -> list[float]:
    """The model: what follows a text, with a second choice. Ends come now and then."""
    mixed = hash(tokens) & 0xFFFFFFFF
    row = [0.0] * VOCAB
    row[1 + mixed // 7 % (NO_NUMBER - 1)] = 3.0
    row[EOS if mixed % 23 == 0 else 1 + mixed % (NO_NUMBER - 1)] = 4.0
    return row


class ReadingRunner:
    """A forward pass that is only about what is kept where."""

    def __init__(self, kv: KVCache, is_to_fail: Callable[[], bool]) -> None:
        self._kv, self._is_to_fail = kv, is_to_fail

    def run(self, plan: StepPlan) -> Tensor:
        if self._is_to_fail():
            raise MemoryError("before anything was written")
        rows: list[list[float]] = []
        for chunk in plan.chunks:
            self._write(chunk)
        if self._is_to_fail():
            raise RuntimeError("after everything was written")
        for chunk in plan.chunks:
            prompt = chunk.sequence.request.prompt_token_ids
            if POISON in prompt:
                raise ValueError("this sequence can never be computed")
            tokens = self._read(chunk)
            for at in range(chunk.logits_from, chunk.stop):
                row = logits_of(tokens[: at + 1])
                rows.append([float("nan")] * VOCAB if NO_NUMBER in prompt else row)
        return torch.tensor(rows).reshape(-1, VOCAB)

    overwrites_states = False

    def close(self) -> None:
        """Nothing is held."""

    def _write(self, chunk: Chunk) -> None:
        tokens = torch.tensor(chunk.token_ids, dtype=torch.float32)
        positions = torch.arange(chunk.start, chunk.stop, dtype=torch.float32)
        for number, group in enumerate(self._kv.accounting.groups):
            slots = self._slots(number, chunk, chunk.start)
            shape = (len(tokens), group.spec.num_kv_heads, group.spec.head_dim)
            k = tokens[:, None, None].expand(shape)
            v = positions[:, None, None].expand(shape)
            for layer in group.layers:
                self._kv.storage.write(layer, slots, k, v)

    def _read(self, chunk: Chunk) -> tuple[int, ...]:
        """The sequence as the full layers have it; the windows' part of it must agree."""
        own = [*chunk.sequence.token_ids[: chunk.start], *chunk.token_ids]
        found: tuple[int, ...] = ()
        for number, group in enumerate(self._kv.accounting.groups):
            windowed = isinstance(group.spec, SlidingWindow)
            first = max(0, chunk.start - WINDOW + 1) if windowed else 0
            slots = self._slots(number, chunk, first)
            for layer in group.layers:
                k, v = self._kv.storage.gather(layer, slots)
                tokens, positions = k[0, :, 0].tolist(), v[0, :, 0].tolist()
                assert positions == list(range(first, chunk.stop)), "entries lie elsewhere"
                assert tokens == own[first:], "somebody else's entries"
                if not windowed:
                    found = tuple(int(token) for token in tokens)
        return found

    def _slots(self, number: int, chunk: Chunk, first: int) -> Tensor:
        seq_id = chunk.sequence.seq_id
        return torch.from_numpy(self._kv.accounting.slots(number, seq_id, first, chunk.stop))


class Guesser:
    """Drafts that are often right."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def propose(self, sequences: list[Sequence]) -> Drafts:
        drafts: dict[int, tuple[int, ...]] = {}
        for sequence in sequences:
            tokens = list(sequence.token_ids)
            for _ in range(self._rng.randrange(5)):
                row = logits_of(tuple(tokens))
                right = row.index(max(row))
                tokens.append(right if self._rng.random() < 0.7 else 1 + self._rng.randrange(20))
            if len(tokens) > sequence.num_tokens:
                drafts[sequence.seq_id] = tuple(tokens[sequence.num_tokens :])
        return drafts

    def forget(self, sequence: Sequence) -> None:
        pass


class Stage:
    """A machine whose memory comes and goes, and its clock."""

    def __init__(self, total_bytes: int, rng: random.Random) -> None:
        self.total_bytes, self.others_bytes, self.time_s = total_bytes, 0, 0.0
        self._rng = rng
        self.committed: Callable[[], int] = int

    def now_s(self) -> float:
        self.time_s += 1e-3 * self._rng.random()  # whatever is measured takes a while
        return self.time_s

    def read(self) -> MemoryReading:
        left = self.total_bytes - self.others_bytes - self.committed()
        return MemoryReading(total_bytes=self.total_bytes, available_bytes=max(0, left))


class Chance:
    """Contains each number with the probability of the moment."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.share = rng, 0.0

    def __contains__(self, _: object) -> bool:
        return self.share > 0 and self.rng.random() < self.share


class World:
    """One engine, from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        layers = rng.choice(["full", "hybrid"])
        self.option = rng.choice(sorted(OPTIONS))
        strategy, changed = OPTIONS[self.option]
        spec = ModelSpec(
            model_type="simulated",
            layers=tuple(Layer(specs=(spec,)) for spec in SPECS[layers]),
            max_model_len=LONGEST,
            dtype="float32",
        )
        self.max_num_seqs = rng.randint(1, 6)
        self.capacity = rng.randint(LONGEST, 5 * LONGEST) * TOKEN_BYTES[layers]
        self.host, self.refused = HostMemory(), Chance(rng)
        config = CacheConfig(
            max_model_len=LONGEST,
            max_num_seqs=self.max_num_seqs,
            capacity_bytes=self.capacity,
            page_bytes=self.host.page_bytes,
            enable_prefix_caching=rng.random() < 0.8,
            **changed,
        )
        memory = FailingMemory(self.host, failing=self.refused)
        self.resident = HostResident(memory, "on-demand", self.capacity)

        def make_pair() -> tuple[Accounting, Storage]:
            accounting = build_accounting(strategy, spec, config)
            return accounting, build_storage(strategy, accounting, self.resident.provider)

        self.kv = KVCache(make_pair)
        limits = Limits(
            max_model_len=LONGEST,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=rng.choice([4, 16, 64, 200]),
            eos_token_ids=frozenset([EOS]),
            watermark_bytes=rng.choice([0, 0, self.capacity // 20]),
            policy=rng.choice(sorted(POLICIES)),
        )
        self.max_tokens = limits.max_num_batched_tokens
        self.stage = Stage(8 * self.capacity, rng)
        self.stage.committed = lambda: self.kv.memory.committed_bytes
        swap_bytes = rng.choice([0, self.capacity // 2, 4 * self.capacity])
        costs = Costs(bytes_per_token=TOKEN_BYTES[layers])
        self.scheduler = Scheduler(
            self.kv.accounting, limits, swap=SwapSpace(swap_bytes), costs=costs
        )
        mover = ShelfMover(self.kv, MemoryShelf(), HostTimer(self.stage.now_s))
        swap = SwapStore(self.kv, mover, costs)
        self.fault_share = rng.choice([0.0, 0.0, 0.02, 0.1])
        runner = ReadingRunner(self.kv, lambda: rng.random() < self.fault_share)
        self.sampler = Sampler(0)
        drafter = Guesser(rng) if rng.random() < 0.5 else None
        self.engine = Engine(
            self.scheduler, self.kv, runner, self.sampler, drafter, swap, self.stage.now_s
        )
        self.elastic = Elastic(
            self.kv, self.resident, self.scheduler, Governor("shared"), self.stage, CacheLock()
        )
        self.sequences: list[Sequence] = []
        self.heard: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, int] = defaultdict(int)  # how often an end was reported

    def run(self) -> int:
        """To the end. Returns: the number of steps."""
        num_steps, num_requests = 0, self.rng.randint(1, 8)
        texts = [[1 + self.rng.randrange(20) for _ in range(LONGEST)] for _ in range(3)]
        refusals = self.rng.choice([0.0, 0.0, 0.05])
        while num_requests or self.scheduler.has_unfinished:
            assert num_steps < 5000, "it does not come to an end"
            while num_requests and self.rng.random() < 0.5:
                num_requests -= 1
                self.arrive(num_requests, texts)
            self.disturb()
            self.refused.share = refusals
            self.step()
            self.refused.share = 0.0
            self.scheduler.check()
            num_steps += 1
        self.check()
        return num_steps

    def arrive(self, number: int, texts: list[list[int]]) -> None:
        rng = self.rng
        prompt = rng.choice(texts)[: rng.randint(1, LONGEST)]
        prompt += [1 + rng.randrange(20) for _ in range(rng.randrange(4))]
        if rng.random() < 0.08:
            prompt[rng.randrange(len(prompt))] = rng.choice([POISON, NO_NUMBER])
        params = SamplingParams(
            max_tokens=rng.randint(1, 30),
            n=rng.choice([1, 1, 1, 2, 4]),
            temperature=rng.choice([0.0, 0.0, 1.0]),
            seed=rng.randrange(1000),
            ignore_eos=rng.random() < 0.3,
        )
        request = Request(
            request_id=number,
            prompt_token_ids=tuple(prompt),
            params=params,
            priority=rng.randrange(3),
        )
        try:
            self.sequences += self.scheduler.add(request, arrived_s=self.stage.time_s)
        except RequestTooLong:
            assert len(prompt) >= LONGEST or self.kv.accounting.ceiling.capacity_bytes

    def disturb(self) -> None:
        rng = self.rng
        self.stage.time_s += rng.choice([0.01, 0.3, 40.0])
        if rng.random() < 0.1:
            self.stage.others_bytes = rng.randrange(self.stage.total_bytes)
        if rng.random() < 0.05:
            self.elastic.resize(rng.randint(self.capacity // 4, self.capacity))
        if rng.random() < 0.1:  # memory for a step comes and goes
            self.scheduler.token_budget = rng.choice([1, 3, self.max_tokens])
        if self.sequences and rng.random() < 0.05:
            sequence = rng.choice(self.sequences)
            if sequence.finish_reason is None:
                self.ends[sequence.seq_id] += 1
            self.engine.finish(sequence, "abort")

    def step(self) -> None:
        self.elastic.settle()
        for output in self.engine.step():
            seq_id = output.sequence.seq_id
            if output.token_id is not None:
                self.heard[seq_id].append(output.token_id)
            self.ends[seq_id] += output.finish_reason is not None

    def check(self) -> None:
        for sequence in self.sequences:
            reason, prompt = sequence.finish_reason, sequence.request.prompt_token_ids
            told = sequence.output_token_ids
            assert self.ends[sequence.seq_id] == 1, "its end was not reported once"
            assert told == self.heard[sequence.seq_id], "its tokens were not reported once each"
            if POISON in prompt or NO_NUMBER in prompt:
                assert reason in ("error", "abort", "capacity"), reason
                assert not told
                continue
            want = self.text_alone(sequence)
            assert told == want[: len(told)], (sequence.seq_id, told, want)
            if reason in ("stop", "length"):
                assert len(told) == len(want)
            elif reason == "error":
                assert self.fault_share, sequence.finish_detail  # failed, and failed alone
        assert not self.scheduler.num_running
        assert not self.scheduler.num_waiting
        self.check_statistics()
        assert self.kv.accounting.reset_prefix_cache()
        self.kv.carry_out()
        usage = self.kv.accounting.usage()
        assert usage.num_sequences == usage.used_bytes == usage.committed_bytes == 0
        assert self.kv.memory.committed_bytes == 0
        self.kv.close()

    def check_statistics(self) -> None:
        """Each sequence ended once and each token came once, whatever failed meanwhile."""
        counted, told = (
            self.scheduler.statistics,
            [s for s in self.sequences if self.heard[s.seq_id]],
        )
        assert sum(counted.num_finished.values()) == counted.e2e_s.count == len(self.sequences)
        assert counted.num_generation_tokens == sum(map(len, self.heard.values()))
        assert counted.first_token_s.count == counted.decode_s.count == len(told)
        no_numbers = [
            s
            for s in self.sequences
            if NO_NUMBER in s.request.prompt_token_ids and s.finish_reason == "error"
        ]
        assert counted.num_corrupted <= len(no_numbers)
        assert self.fault_share or counted.num_corrupted == len(no_numbers)
        for sequence in self.sequences:
            moments = sequence.arrived_s, sequence.came_s, sequence.first_token_s
            several = [at for at in (*moments, sequence.last_token_s, sequence.ended_s) if at]
            assert several == sorted(several), "it ended before it came"
        hits = counted.prefix_hit_tokens + sum(counted.prefix_missed_tokens.values())
        assert hits <= counted.prefix_query_tokens
        assert sum(self.scheduler.waiting_by_reason.values()) == 0

    def text_alone(self, sequence: Sequence) -> list[int]:
        """What it gets with nobody beside it and nothing kept."""
        request = sequence.request
        lone = Sequence(request, seq_id=sequence.seq_id, index=sequence.index)
        while True:
            row = torch.tensor([logits_of(tuple(lone.token_ids))])
            chunk = Chunk(sequence=lone, start=0, stop=lone.num_tokens, samples=True)
            plan = StepPlan.of([chunk])
            (sampled,) = self.sampler.sample(row, plan)
            (token,) = sampled.token_ids
            lone.token_ids.append(token)
            ended = token == EOS and not request.params.ignore_eos
            full = lone.num_tokens >= self.scheduler.limits.longest(request)
            if ended or full:
                return lone.output_token_ids


def replay(seed: int) -> int:
    """Run one world. Raises: AssertionError naming the seed."""
    try:
        return World(seed).run()
    except (AssertionError, Exception) as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
