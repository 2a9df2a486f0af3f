"""A whole engine from a seed: a model that reads back what was kept, its own clock, and faults.

``World(seed).run()`` builds an engine with random options over real storage, sends it random
requests, beam searches among them, and disturbs it: steps that fail before or after they have
written, sequences that can never be computed, logits that are no numbers, pages that the system
refuses, a machine that runs out of memory, a capacity that is changed, clients that go away. Only
the forward pass is a stand-in: ``ReadingRunner`` writes each token with its position into its
slots, reads all that a query may read, and demands that it is what the sequence has there. Its
logits are a function of what it has read.

What must hold: every sequence that was not ended from outside gets the tokens that it gets alone;
the others get a beginning of them; each token is reported once; a search finds what it finds alone,
at least if none of its beams was ended; no step reads what it should not; and at the end every
block is free.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256

import torch
from torch import Tensor

from conformance.strategy_cases import OPTIONS
from quire.engine.beam_search import BeamSearch
from quire.engine.cache_lock import CacheLock
from quire.engine.core import Engine
from quire.engine.elastic import Elastic
from quire.engine.kv_cache import KVCache
from quire.engine.offloading.block_copies import BlockCopies, record_formats
from quire.engine.offloading.carrier import ThreadedCarrier
from quire.engine.offloading.staging import Staging
from quire.engine.sampling import LogitsSampler
from quire.engine.scheduler import Drafts, Scheduler, SchedulerLimits
from quire.engine.scheduling.block_carrier import LoadJob
from quire.engine.scheduling.offload_policy import OffloadPolicy
from quire.engine.scheduling.policy import POLICIES
from quire.engine.scheduling.step_costs import Costs
from quire.engine.scheduling.swap_space import SwapSpace
from quire.engine.sequence import Request, Sequence
from quire.engine.step_plan import Chunk, Save, StepPlan, TokenOutput
from quire.engine.swap.kv_mover import HostTimer, StoreMover
from quire.engine.swap.kv_store import MemoryKVStore
from quire.engine.swap.swapper import Swapper
from quire.errors import RequestTooLong
from quire.kv import Accounting, CacheConfig, Storage, build_accounting, build_storage
from quire.kv.interface import ExternalBlocks
from quire.memory import FailingMemory, HostMemory
from quire.memory.controller import MemoryController
from quire.memory.machine.readings import MemoryReading
from quire.memory.residency import HostResident
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.spec import FullAttention, Layer, ModelSpec, SlidingWindow
from quire.tiers.guard import GuardedTier
from quire.tiers.host_memory import HostMemoryTier
from quire.tiers.record import Checksums
from tiers.faulty import BYTE_FAULTS, FaultyTier

CALLS = (
    "error",
    "full",
    "short",
    "lost",
    "found",
    "forgotten",
    "twice",
)  # faults that take no time
IN_BLOCKS = [name for name, (strategy, _) in OPTIONS.items() if strategy in ("paged", "virtual")]
VOCAB, EOS = 32, 0
POISON, NO_NUMBER = 31, 30  # a prompt with such a token: its step fails, its logits are NaN
LONGEST = 48
WINDOW = 9
FULL = FullAttention(num_kv_heads=2, head_dim=64, dtype="float32")
SLIDING = SlidingWindow(num_kv_heads=1, head_dim=64, dtype="float32", window=WINDOW)
TOKEN_BYTES = {"full": 1024, "hybrid": 1536}
SPECS = {"full": (FULL,), "hybrid": (FULL, SLIDING)}


def logits_of(tokens: tuple[int, ...]) -> list[float]:
    """The model: what follows a text, with a second choice. Ends come now and then.

    No two tokens are equally likely, so that a search has no choice between equals.
    """
    mixed = hash(tokens) & 0xFFFFFFFF
    row = [((mixed ^ token * 0x9E3779B1) * 40503 >> 9 & 0xFFFF) / 2**17 for token in range(VOCAB)]
    row[1 + mixed // 7 % (NO_NUMBER - 1)] = 3.0 + mixed % 97 / 100
    row[EOS if mixed % 23 == 0 else 1 + mixed % (NO_NUMBER - 1)] = 4.0
    return row


class ReadingRunner:
    """A forward pass that is only about what is kept where."""

    def __init__(self, kv: KVCache, is_to_fail: Callable[[], bool]) -> None:
        self._kv, self._is_to_fail = kv, is_to_fail
        self.misread: list[str] = []  # an engine survives what a step raises: a test is to hear

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
            own = [*chunk.sequence.token_ids[: chunk.start], *chunk.token_ids]
            in_window = max(0, chunk.start - WINDOW + 1)
            slots = [
                self._slots(number, chunk, in_window if isinstance(spec, SlidingWindow) else 0)
                for number, spec in enumerate(group.spec for group in self._kv.accounting.groups)
            ]
            tokens = self.read(chunk.sequence, own, slots)
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

    def read(self, sequence: Sequence, own: list[int], slots: list[Tensor]) -> tuple[int, ...]:
        """What is in these slots of each group, of which the full layers have all ``own`` tokens.

        Raises: AssertionError if it is not what the sequence has there.
        """
        found: tuple[int, ...] = ()
        for number, group in enumerate(self._kv.accounting.groups):
            first = len(own) - len(slots[number])
            for layer in group.layers:
                k, v = self._kv.storage.gather(layer, slots[number])
                tokens, positions = k[0, :, 0].tolist(), v[0, :, 0].tolist()
                if positions != list(range(first, len(own))) or tokens != own[first:]:
                    self.misread.append(f"sequence {sequence.seq_id}: {tokens} at {positions}")
                    raise AssertionError(self.misread[-1])
                if not isinstance(group.spec, SlidingWindow):
                    found = tuple(int(token) for token in tokens)
        return found

    def _slots(self, number: int, chunk: Chunk, first: int) -> Tensor:
        seq_id = chunk.sequence.seq_id
        return torch.from_numpy(self._kv.accounting.slots(number, seq_id, first, chunk.stop))


class ReadingSwap:
    """Swap that reads what it is to save."""

    def __init__(self, swap: Swapper, runner: ReadingRunner) -> None:
        self._swap, self._runner = swap, runner
        self.load, self.forget, self.close = swap.load, swap.forget, swap.close

    def save(self, saves: Iterable[Save]) -> list[Sequence]:
        several = list(saves)
        for save in several:
            own = save.sequence.token_ids[: save.sequence.num_saved_tokens]
            slots = [torch.from_numpy(own_slots) for own_slots in save.slots]
            with suppress(AssertionError):  # it is noted, and the world goes on
                self._runner.read(save.sequence, own, slots)
        return self._swap.save(several)


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


class Search:
    """A beam search, and the sequences that it is over."""

    def __init__(self, engine: Engine, params: BeamSearchParams, sequences: list[Sequence]) -> None:
        self.params, self.sequences = params, sequences
        self.found = BeamSearch(
            engine, params, sequences, frozenset([EOS]), None, 0, lambda _: None
        )

    def hear(self, output: TokenOutput) -> None:
        if output.sequence in self.sequences:
            self.found.hear(output)


class Attic:
    """Records that one world leaves to the next, of each kind of cache."""

    def __init__(self) -> None:
        self._tiers: dict[str, HostMemoryTier] = {}
        self.num_loaded = self.num_hit_tokens = self.num_bad = 0

    def tier(self, kind: str, record_bytes: int) -> HostMemoryTier:
        if kind not in self._tiers:
            self._tiers[kind] = HostMemoryTier(256 * record_bytes, record_bytes)
            self._tiers[kind].close = lambda: None  # type: ignore[method-assign]
        return self._tiers[kind]


class Carrier(ThreadedCarrier):
    """Loads and stores when the world lets it, and lies as tiers may."""

    def __init__(self, kv: KVCache, attic: Attic, seed: int, stage: Stage) -> None:
        accounting, self._stage = kv.accounting, stage
        self._draw = draw = random.Random(seed)
        assert isinstance(accounting, ExternalBlocks)
        size = accounting.index.block_size
        kind = f"{[type(group.spec).__name__ for group in accounting.groups]} {size}"
        formats = record_formats(kv, sha256(kind.encode()).digest(), size, Checksums())
        largest = max(form.num_bytes for form in formats)
        faults = draw.choice([(), (), CALLS, (*CALLS, *BYTE_FAULTS)])
        tiers = [
            GuardedTier(
                f"{number}",
                FaultyTier(
                    attic.tier(f"{number} {kind} {largest}", largest),
                    seed=seed,
                    faults=faults or CALLS,
                    share=draw.choice([0.02, 0.2]) if faults else 0.0,
                ),
                formats,
            )
            for number in range(draw.randint(1, 2))
        ]
        sizes = [form.num_bytes for form in formats]
        staging = Staging(draw.choice([2, 8, 100]) * sum(sizes), sizes)
        super().__init__(accounting.groups, size, BlockCopies(kv), tiers, staging)

    def load_s(self, num_blocks: int) -> float:
        return 0.0

    @property
    def store_s_per_block(self) -> float:
        return 0.0

    def load(self, job: LoadJob, wait_s: float) -> bool:
        return super().load(job, 1e9)  # a tier's deadline is on this machine's clock

    def loaded(self) -> list[LoadJob]:
        self.work(loads=self._draw.random() < 0.6, stores=self._draw.random() < 0.6)
        return super().loaded()

    def wait(self, seconds: float) -> None:
        self._stage.time_s += self._draw.random() * seconds
        self.work()

    def wait_for_room(self, seconds: float) -> None:
        self.work(loads=False)
        self._stage.time_s += seconds / 10

    def close(self) -> None:
        while self.work():
            pass
        super().close()


class World:
    """One engine, from a seed."""

    def __init__(self, seed: int, attic: Attic | None = None) -> None:
        """With an ``attic`` blocks leave the pool, and come back from earlier worlds, too."""
        self.rng = rng = random.Random(seed)
        self.attic = attic
        layers = rng.choice(["full", "hybrid"])
        self.option = rng.choice(sorted(OPTIONS if attic is None else IN_BLOCKS))
        strategy, changed = OPTIONS[self.option]
        self.spec = spec = ModelSpec(
            model_type="simulated",
            layers=tuple(Layer(specs=(spec,)) for spec in SPECS[layers]),
            max_model_len=LONGEST,
            dtype="float32",
        )
        self.max_num_seqs = rng.randint(1, 6)
        self.capacity = rng.randint(LONGEST, rng.choice([5, 12]) * LONGEST) * TOKEN_BYTES[layers]
        self.host, self.refused = HostMemory(), Chance(rng)
        config = CacheConfig(
            max_model_len=LONGEST,
            max_num_seqs=self.max_num_seqs,
            capacity_bytes=self.capacity,
            page_bytes=self.host.page_bytes,
            enable_prefix_caching=rng.random() < 0.8 or attic is not None,
            **changed,
        )
        memory = FailingMemory(self.host, failing=self.refused)
        self.resident = HostResident(memory, "on-demand", self.capacity)

        def make_pair() -> tuple[Accounting, Storage]:
            accounting = build_accounting(strategy, spec, config)
            return accounting, build_storage(strategy, accounting, self.resident.provider)

        self.kv = KVCache(make_pair)
        limits = SchedulerLimits(
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
        mover = StoreMover(self.kv, MemoryKVStore(), HostTimer(self.stage.now_s))
        self.fault_share = rng.choice([0.0, 0.0, 0.02, 0.1])
        self.runner = ReadingRunner(self.kv, lambda: rng.random() < self.fault_share)
        swap = ReadingSwap(Swapper(self.kv, mover, costs), self.runner)
        self.sampler = LogitsSampler(0)
        drafter = Guesser(rng) if rng.random() < 0.5 else None
        self.engine = Engine(
            self.scheduler, self.kv, self.runner, self.sampler, drafter, swap, self.stage.now_s
        )
        if attic is not None and isinstance(self.kv.accounting, ExternalBlocks):
            self.carrier = Carrier(self.kv, attic, seed, self.stage)
            if rng.random() < 0.8:  # computing takes longer than whatever the stage does
                costs.recompute_s = lambda _: 1e6  # type: ignore[method-assign]
            self.scheduler.offload = OffloadPolicy(
                self.carrier,
                self.kv.accounting,
                costs,
                self.stage.now_s,
                write=random.Random(seed).choice(["auto", "always", "never"]),
            )
        self.elastic = Elastic(
            self.kv,
            self.resident,
            self.scheduler,
            MemoryController("shared"),
            self.stage,
            CacheLock(),
        )
        self.sequences: list[Sequence] = []  # that no search is about
        self.searches: list[Search] = []
        self.search_share = rng.choice([0.0, 0.3, 0.6])
        self.heard: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, int] = defaultdict(int)  # how often an end was reported

    def run(self) -> int:
        """To the end. Returns: the number of steps."""
        num_steps, num_requests = 0, self.rng.randint(1, 8)
        comes = self.rng.choice([0.5, 0.15])
        words = self.rng if self.attic is None else random.Random(self.rng.randrange(4))
        texts = [[1 + words.randrange(20) for _ in range(LONGEST)] for _ in range(3)]
        refusals = self.rng.choice([0.0, 0.0, 0.05])
        while num_requests or self.scheduler.has_unfinished:
            assert num_steps < 5000, "it does not come to an end"
            while num_requests and self.rng.random() < comes:
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
        beams = BeamSearchParams(
            beam_width=rng.randint(2, 4),
            max_tokens=rng.randint(4, 40),
            ignore_eos=rng.random() < 0.7,
            length_penalty=rng.choice([0.0, 1.0]),
        )
        is_search = rng.random() < self.search_share
        if is_search and rng.random() < 0.8:  # beams part once they have begun
            prompt = prompt[-rng.randint(1, 12) :]
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
            params=beams.sampling([EOS], VOCAB) if is_search else params,
            priority=rng.randrange(3),
            beam=beams if is_search else None,
        )
        try:
            sequences = self.scheduler.add(request, arrived_s=self.stage.time_s)
            if is_search:
                self.searches.append(Search(self.engine, beams, sequences))
            else:
                self.sequences += sequences
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
        if self.searches and rng.random() < 0.01:
            for sequence in rng.choice(self.searches).sequences:
                self.engine.finish(sequence, "abort")

    def step(self) -> None:
        self.elastic.settle()
        for output in self.engine.step():
            seq_id = output.sequence.seq_id
            if output.sequence.request.chosen_outside:
                for search in self.searches:
                    search.hear(output)
                continue
            if output.token_id is not None:
                self.heard[seq_id].append(output.token_id)
            self.ends[seq_id] += output.finish_reason is not None

    def check(self) -> None:
        assert not self.runner.misread, self.runner.misread
        for search in self.searches:
            self.check_search(search)
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
        if not self.searches:  # whose tokens nothing reports
            self.check_statistics()
        if self.scheduler.offload is not None:
            self.check_offloading(self.scheduler.offload)
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

    def check_offloading(self, offload: OffloadPolicy) -> None:
        """All staging memory is given back. What was counted is told to the attic."""
        offload.close()
        self.scheduler.offload = None
        staging = self.carrier.staging
        for job in self.carrier.loaded():  # whose sequence has ended meanwhile
            self.carrier.release(job)
        while self.carrier.work():
            pass
        assert staging.free_bytes == staging.capacity_bytes, "staging memory is lost"
        assert not offload._jobs, "a job outlives its sequence"
        self.carrier._forgetting.check()
        assert self.attic is not None
        self.attic.num_hit_tokens += offload.counts.hit_tokens
        for tier in self.carrier.tiers:
            self.attic.num_loaded += tier.counts.num_loaded
            self.attic.num_bad += sum(tier.counts.num_bad.values())

    def check_search(self, search: "Search") -> None:
        """What it found has the scores that the model gives; and if no beam was lost, it is all."""
        assert search.found.is_over
        reasons = {sequence.finish_reason for sequence in search.sequences}
        (prompt,) = {sequence.request.prompt_token_ids for sequence in search.sequences}
        if POISON in prompt or NO_NUMBER in prompt:
            assert reasons <= {"error", "abort", "capacity"}, reasons
            return
        for hypothesis in search.found.hypotheses:
            total, text = 0.0, hypothesis.token_ids
            for place, token in enumerate(text):
                row = torch.tensor(logits_of((*prompt, *text[:place])))
                total += row.log_softmax(-1)[token].item()
            assert math.isclose(hypothesis.cumulative_logprob, total, abs_tol=1e-3)
        if reasons == {"stop"}:
            assert self.texts(search) == self.texts(self.search_alone(search))
        elif "error" in reasons:
            assert self.fault_share  # failed, and failed alone

    @staticmethod
    def texts(search: "Search") -> list[tuple[int, ...]]:
        return [hypothesis.token_ids for hypothesis in search.found.hypotheses]

    def search_alone(self, search: "Search") -> "Search":
        """The same with no other beside it and room for all."""
        config = CacheConfig(
            max_model_len=LONGEST,
            max_num_seqs=len(search.sequences),
            capacity_bytes=16 * self.capacity,
            page_bytes=self.host.page_bytes,
        )

        def make_pair() -> tuple[Accounting, Storage]:
            accounting = build_accounting("paged", self.spec, config)
            return accounting, build_storage("paged", accounting, self.host)

        kv = KVCache(make_pair)
        limits = replace(self.scheduler.limits, max_num_seqs=config.max_num_seqs, watermark_bytes=0)
        scheduler = Scheduler(kv.accounting, limits)
        engine = Engine(scheduler, kv, ReadingRunner(kv, bool), LogitsSampler(0))
        again = Search(engine, search.params, scheduler.add(search.sequences[0].request))
        while scheduler.has_unfinished:
            for output in engine.step():
                again.hear(output)
        kv.close()
        return again

    def text_alone(self, sequence: Sequence) -> list[int]:
        """What it gets with no other beside it and nothing kept."""
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


def replay(seed: int, attic: Attic | None = None) -> int:
    """Run one world. Raises: AssertionError naming the seed."""
    try:
        return World(seed, attic).run()
    except (AssertionError, Exception) as error:
        raise AssertionError(f"seed {seed}: {error!r}") from error
