"""Random use of the scheduler over every accounting, and the promises that each step has to keep.

``Watch`` drives a scheduler step by step, with no model and no tensor, and checks after each what
it promises, progress above all:

- A step computes at least one token or ends a sequence, or else it took the room of all away, and
  then the next one does. So of any two steps in a row one gets on with the work.
- Computing again what was lost is work too, so that is not enough: within ``max_model_len + 2``
  steps a token is computed that its sequence never had before, or a sequence ends. For the first
  running sequence is served first, and loses its room only when it runs alone, or to one of a
  better grade; it begins anew with room for all that it had, so that it comes at least one token
  further.
- One that is held back for a prefix waits for a sequence that computes tokens of that prefix in the
  same step, at most a few times without finding more afterwards; none but those are overtaken.
- What swap brings back is what the sequence had, and no sequence has swap space that needs none.

``SchedulerMachine`` adds what happens around a scheduler: policies, requests of all sizes and of
several continuations, bursts of equal prompts of which the one that computes is aborted, guesses,
swap that fails, aborts, memory that others hold, and a budget that shrinks and grows under running
sequences.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from conformance.mapping_checks import counted_mappings
from conformance.sharing_model import SHARING_KINDS, groups_of
from conformance.strategy_cases import KINDS, OPTIONS
from quire.engine.scheduler import NO_DRAFTS, Drafts, Scheduler, SchedulerLimits
from quire.engine.scheduling.policy import POLICIES
from quire.engine.scheduling.step_costs import Costs, Prices
from quire.engine.scheduling.swap_space import SwapSpace, slots_of
from quire.engine.sequence import Request, Sequence
from quire.engine.step_plan import Chunk, Sampled, StepPlan
from quire.errors import RequestTooLong
from quire.kv import EVICTION_POLICIES, STRATEGIES, Accounting, CacheConfig, Fits, PrefixKeys
from quire.kv.paged import PagedAccounting
from quire.sampling_params import SamplingParams

EOS = 0
HEADROOM = (0.0, 0.0, None, 1.0)
PRICES = (None, Prices(step_s=1.0, token_s=1e-4), Prices(step_s=1.0, token_s=0.05))
NextToken = Callable[[Sequence], int]
TENANTS = (PrefixKeys(), PrefixKeys(), PrefixKeys(salt="a"), PrefixKeys(lora="a" * 64))


class Watch:
    """A scheduler, its cache, and what it has done so far."""

    def __init__(
        self,
        make: Callable[[], Accounting],
        *,
        max_model_len: int,
        max_num_seqs: int,
        budget: int,
        watermark_bytes: int = 0,
        skips: bool = True,
        staggered: bool = False,
        policy: str = "fcfs",
        headroom: float | None = None,
        prices: Prices | None = None,
        swap_bytes: int = 0,
        shared_tokens: int = 16,
    ) -> None:
        self.make, self.accounting = make, make()
        self.max_model_len, self.max_num_seqs, self.budget = max_model_len, max_num_seqs, budget
        self.skips = skips  # a prefix that is known need not be computed
        self.staggered = staggered  # what it takes ahead depends on where it began
        self.policy = POLICIES[policy]
        self.scheduler = Scheduler(
            self.accounting,
            SchedulerLimits(
                policy=policy,
                headroom=headroom,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                eos_token_ids=frozenset([EOS]),
                watermark_bytes=watermark_bytes,
                shared_tokens=shared_tokens,
            ),
            swap=SwapSpace(swap_bytes),
            costs=Costs(prices=prices),
        )
        self.num_held_back = 0  # waits of all sequences
        self.saved: dict[int, tuple[int, list[int]]] = {}  # tokens, and from which on, by group
        self.sequences: list[Sequence] = []  # those that were not refused, in order of arrival
        self.alone = True  # nothing else holds memory, so that Never must mean it
        self.num_steps = 0
        self.num_computed: Counter[int] = Counter()  # by sequence, everything it was …
        self.num_recomputed: Counter[int] = Counter()  # … served, again, …
        self.num_skipped: Counter[int] = Counter()  # … and spared
        self._reached: dict[int, tuple[int, int]] = {}  # preemptions, tokens computed since
        self._texts: dict[int, list[int]] = {}  # the most that a sequence has computed
        self._was_idle = False  # the last step neither computed nor ended anything
        self._steps_without_news = 0

    @property
    def unfinished(self) -> list[Sequence]:
        return [s for s in self.sequences if s.finish_reason is None]

    def add(self, request: Request) -> Sequence | None:
        """Queue a request. None: it was refused, as an empty cache could not hold its prompt."""
        length = len(request.prompt_token_ids)
        longest = min(request.max_tokens, self.max_model_len)
        if isinstance(self.accounting.could_hold(length, max_tokens=longest), Fits):
            sequences = self.scheduler.add(request)
            self.sequences += sequences
            self.scheduler.check()
            self.forgive()  # who runs may have to make room for it
            return sequences[0]
        before = self.accounting.usage(), self.scheduler.num_waiting, self.scheduler.has_unfinished
        with pytest.raises(RequestTooLong, match=f"prompt of {length} tokens can never.*raise "):
            self.scheduler.add(request)
        after = self.accounting.usage(), self.scheduler.num_waiting, self.scheduler.has_unfinished
        assert after == before, "a refusal has changed something"
        self.scheduler.check()
        return None

    def abort(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence, "stop", "aborted")
        assert sequence.finish_reason is not None
        self.assert_unknown(sequence.seq_id)
        self.scheduler.finish(sequence, "length", "a second call does nothing")
        assert sequence.finish_detail != "a second call does nothing"
        self.forgive()
        self.scheduler.check()

    def forgive(self) -> None:
        """Something happened from outside: a sequence may need as many steps as ever again."""
        self._steps_without_news = 0

    def step(self, next_token: NextToken, drafts: Drafts = NO_DRAFTS) -> None:
        unfinished, lost = self.unfinished, self.scheduler.num_preemptions
        running = self.running
        first = running[0] if running else None
        lost_by_first = first.num_preemptions if first else 0
        plan = self.scheduler.plan(drafts)
        self.swap_out(plan)
        with counted_mappings(self.accounting):
            self.accounting.drain()
        self.scheduler.check()
        ended = [s for s in unfinished if s.finish_reason is not None]
        if first and first.num_preemptions > lost_by_first:
            better = [s for s in unfinished if self.policy.grade(s) < self.policy.grade(first)]
            alone = not self.scheduler.num_running  # all others had to make room before it did
            assert alone or better, "the first made room for another"
        self.check_plan(plan)
        self.check_held_back(plan)
        self.check_order(plan, running)
        for sequence in ended:
            self.check_lack_of_room(sequence)
        is_idle = not plan.chunks and not ended and bool(unfinished)
        assert not (is_idle and self._was_idle), "two steps in a row without progress"
        assert not is_idle or self.scheduler.num_preemptions > lost, "a step did nothing at all"
        self._was_idle = is_idle
        self._steps_without_news += bool(unfinished)

        # Some guesses hold, others do not.
        kept = [draw.drafts[: draw.sequence.num_tokens % 3] for draw in plan.draws]
        lengths = [draw.sequence.num_tokens for draw in plan.draws]
        results = [(*ids, next_token(d.sequence)) for ids, d in zip(kept, plan.draws, strict=True)]
        outputs = self.scheduler.update(plan, [Sampled(token_ids=ids) for ids in results])
        with counted_mappings(self.accounting):
            self.accounting.drain()
        sampling = [draw.sequence for draw in plan.draws]
        assert {o.sequence.seq_id for o in outputs} == {s.seq_id for s in [*sampling, *ended]}
        for sequence, length, ids in zip(sampling, lengths, results, strict=True):
            assert sequence.token_ids[length:] == list(ids)
        num_kept = {s.seq_id: len(ids) for s, ids in zip(sampling, kept, strict=True)}
        for chunk in plan.chunks:
            self.note_computed(chunk, num_kept.get(chunk.sequence.seq_id, 0))
        for sequence in self.unfinished:
            if sequence.num_computed_tokens and sequence.seq_id not in self._texts:  # a fork
                computed = sequence.token_ids[: sequence.num_computed_tokens]
                self._texts[sequence.seq_id] = computed
        for output in outputs:
            if output.finish_reason is not None:
                self._steps_without_news = 0
                self.check_end(output.sequence)
        most = self.max_model_len + 2
        assert self._steps_without_news <= most or not self.unfinished, "nothing new is computed"
        self.scheduler.check()
        stats = self.scheduler.statistics
        assert stats.num_recomputed_tokens == self.num_recomputed.total()
        for seq_id in self.scheduler.swap.drain():
            self.saved.pop(seq_id, None)
        self.num_steps += 1

    @property
    def running(self) -> list[Sequence]:
        """By rank: those that hold something."""
        some = [s for s in self.unfinished if self.holds(s)]
        return sorted(some, key=self.policy.rank)

    def holds(self, sequence: Sequence) -> bool:
        try:
            return self.accounting.num_tokens(sequence.seq_id) > 0
        except KeyError:  # it waits for a sibling's prompt
            return False

    def swap_out(self, plan: StepPlan) -> None:
        """As an engine would: save what lies in these slots, before anything changes."""
        for save in plan.saves:
            sequence = save.sequence
            num_saved = sequence.num_saved_tokens
            assert 0 < num_saved <= len(self._texts[sequence.seq_id])
            assert save.num_bytes == sum(
                len(slots) * (group.bytes_per_token or group.bytes_for(1))
                for slots, group in zip(save.slots, self.accounting.groups, strict=True)
            )
            firsts = [num_saved - len(slots) for slots in save.slots]
            self.saved[sequence.seq_id] = num_saved, firsts
        for save in plan.saves:
            if save.sequence.num_tokens % 7 == 0:  # the disk is full
                self.scheduler.lose(save.sequence)
                del self.saved[save.sequence.seq_id]

    def drain(self, next_token: NextToken) -> None:
        """To the end. Each step without news is bounded, so all of them are."""
        limit = self.num_steps + (self.max_model_len + 3) * sum(
            self.max_model_len + 1 - len(self._texts.get(s.seq_id, [])) for s in self.unfinished
        )
        while self.scheduler.has_unfinished:
            assert self.num_steps < limit, "it does not come to an end"
            self.step(next_token)
        assert not self.unfinished
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0

    # -- what is demanded ------------------------------------------------------------------------

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.budget
        assert len(plan.chunks) <= self.max_num_seqs
        for chunk in plan.chunks:
            sequence = chunk.sequence
            stop = chunk.stop - len(chunk.drafts)
            assert 0 <= chunk.start < stop <= sequence.num_tokens
            assert chunk.samples == (stop == sequence.num_tokens)
            assert not chunk.drafts or chunk.stop < self.scheduler.limits.longest(sequence.request)
            assert self.accounting.num_tokens(sequence.seq_id) >= chunk.stop
            num_preemptions, reached = self._reached.get(sequence.seq_id, (-1, 0))
            if num_preemptions == sequence.num_preemptions:
                assert chunk.start == reached, "it does not go on where it was"
            else:
                self.check_skipped(chunk)
        # One that runs and is not served comes after all of its grade: the budget is used up.
        served = {chunk.sequence.seq_id for chunk in plan.chunks}
        unserved = [s for s in self.running if s.seq_id not in served]
        assert not unserved or plan.num_tokens == self.budget
        for sequence in unserved:
            alike = [s for s in self.running if self.policy.grade(s) == self.policy.grade(sequence)]
            later = alike[alike.index(sequence) :]
            assert not served & {s.seq_id for s in later}, "a later one is served before it"

    def check_held_back(self, plan: StepPlan) -> None:
        """Those that wait for a prefix: another one computes it, now."""
        chunks = {chunk.sequence.seq_id: chunk for chunk in plan.chunks}
        waiting = {s.seq_id: s for s in self.unfinished}
        for seq_id, other in self.scheduler.held_back.items():
            sequence, chunk = waiting[seq_id], chunks[other.seq_id]
            assert self.skips
            assert not self.holds(sequence)
            assert sequence.request.keys == other.request.keys
            block = self.accounting.next_block(other.seq_id, other.token_ids)
            assert block is not None
            _, end = block  # of the first block that is filled: the next one may differ
            assert end <= chunk.stop - len(chunk.drafts), "it waits for what is not filled"
            assert sequence.token_ids[:end] == other.token_ids[:end], "it waits for another text"
            assert sequence.num_waits_in_vain <= 3
        self.num_held_back += len(self.scheduler.held_back)

    def check_order(self, plan: StepPlan, running: list[Sequence]) -> None:
        """Of those that wait for room, only who is held back or made room is overtaken."""
        before = {s.seq_id for s in running}
        came = [c.sequence for c in plan.chunks if c.sequence.seq_id not in before]
        last = max(map(self.policy.rank, came), default=None)
        passed = self.scheduler.held_back.keys() | before | self._behind_a_leader()
        for sequence in self.unfinished:
            if last is not None and not self.holds(sequence) and sequence.seq_id not in passed:
                assert self.policy.rank(sequence) > last, "it is overtaken"

    def _behind_a_leader(self) -> set[int]:
        return {s.seq_id for leader in self.unfinished for s in leader.siblings}

    def check_skipped(self, chunk: Chunk) -> None:
        """A sequence that begins, or begins anew, skips only what one like it has computed."""
        sequence, skipped = chunk.sequence, chunk.sequence.token_ids[: chunk.start]
        alike = [s for s in self.sequences if s.request.keys == sequence.request.keys]
        texts = [self._texts.get(s.seq_id, [])[: chunk.start] for s in alike]
        assert skipped in texts, "it skips what no sequence has computed"
        assert self.skips or len(skipped) == chunk.num_restored or sequence.index
        if not sequence.num_preemptions and not sequence.index:
            assert sequence.num_cached_tokens == chunk.start
        if chunk.num_restored:
            num_saved, firsts = self.saved[sequence.seq_id]
            assert num_saved == chunk.start, "it goes on elsewhere than where it was"
            begin = chunk.start - chunk.num_restored
            for number, (group, first) in enumerate(
                zip(self.accounting.groups, firsts, strict=True)
            ):
                # What is brought back was saved, and there is room for it.
                wanted = max(begin, group.live_start(chunk.start))
                assert first <= wanted
                tokens = range(wanted, chunk.start)
                slots = slots_of(self.accounting, number, sequence.seq_id, tokens)
                assert len(slots) == len(tokens)
                assert (slots >= 0).all()

    def note_computed(self, chunk: Chunk, num_kept: int) -> None:
        sequence, seq_id = chunk.sequence, chunk.sequence.seq_id
        stop = chunk.stop - len(chunk.drafts) + num_kept
        assert sequence.num_computed_tokens == stop
        if self._reached.get(seq_id, (-1, 0))[0] != sequence.num_preemptions:
            self.num_skipped[seq_id] += chunk.start
        self._reached[seq_id] = sequence.num_preemptions, stop
        most = len(self._texts.get(seq_id, []))
        self.num_computed[seq_id] += stop - chunk.start
        self.num_recomputed[seq_id] += max(0, min(stop, most) - chunk.start)
        if stop > most:
            self._texts[seq_id] = sequence.token_ids[:stop]
            self._steps_without_news = 0

    def check_end(self, sequence: Sequence) -> None:
        self.assert_unknown(sequence.seq_id)
        if sequence.finish_reason == "capacity":
            return
        # The last token's entry is never needed; the others were each computed or skipped.
        first_token_of_a_sibling = sequence.index > 0 and sequence.num_output_tokens == 1
        reached = self._reached.get(sequence.seq_id, (-1, sequence.num_tokens - 1))
        assert reached[1] == sequence.num_tokens - 1
        assert sequence.seq_id in self._reached or first_token_of_a_sibling
        if sequence.finish_reason == "stop":
            assert sequence.token_ids[-1] == EOS
        else:
            full = sequence.num_tokens == self.max_model_len
            assert sequence.num_output_tokens == sequence.request.params.max_tokens or full

    def check_lack_of_room(self, sequence: Sequence) -> None:
        """It ends for lack of room only where it would have ended with the cache to itself."""
        assert sequence.finish_reason == "capacity"
        options = ["kv_cache_memory_bytes"]
        if not self.alone:  # others have the windows, or the mappings that they take
            options += ["max_num_seqs", "vm.max_map_count"]
        assert any(f"raise {option}" in sequence.finish_detail for option in options)
        if self.alone:
            assert "is all there can be" in sequence.finish_detail
            assert self.staggered or not self.fits_alone(sequence), sequence.finish_detail

    def fits_alone(self, sequence: Sequence) -> bool:
        cache = self.make()
        for chunk in (1, self.budget, sequence.num_tokens):
            cache.add(0, max_tokens=min(sequence.request.max_tokens, self.max_model_len))
            stops = [*range(chunk, sequence.num_tokens, chunk), sequence.num_tokens]
            fits = all(isinstance(cache.try_extend(0, stop), Fits) for stop in stops)
            cache.free(0)
            if fits:
                return True
        return False

    def assert_unknown(self, seq_id: int) -> None:
        with pytest.raises(KeyError):
            self.accounting.num_tokens(seq_id)

    def assert_empty(self) -> None:
        """Nothing is held: what is committed is cached, or shares a page with what is."""
        usage = self.accounting.usage()
        assert usage.num_sequences == usage.num_tokens == usage.used_bytes == 0
        assert usage.committed_bytes >= usage.cached_bytes
        assert bool(usage.committed_bytes) == bool(usage.cached_bytes)
        if isinstance(self.accounting, PagedAccounting):
            pools = self.accounting.pools
            assert pools.held_bytes == 0
            if all(size.granule_blocks == 1 for size in pools.sizes):
                assert usage.committed_bytes == usage.cached_bytes
        assert self.skips or not usage.cached_bytes


class SchedulerMachine(RuleBasedStateMachine):
    """One scheduler, and what comes. ``option`` is a strategy with its options; None: drawn."""

    def __init__(self, option: str | None = None) -> None:
        super().__init__()
        self.option = option

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        draw = data.draw
        strategy, changed = OPTIONS[self.option or draw(st.sampled_from(sorted(OPTIONS)))]
        self.paged, through_windows = strategy == "paged", "shares_pages" in changed
        self.shares = self.paged or through_windows
        if through_windows:
            changed = {**changed, "max_mappings": draw(st.none() | st.integers(4, 60))}
        self.groups = groups_of(draw(st.sampled_from(SHARING_KINDS if self.paged else KINDS)))
        self.longest = draw(st.sampled_from([24, 40]))
        token_bytes = sum(group.bytes_per_token for group in self.groups)
        some = st.integers(self.longest, 2 * self.longest)
        few = st.sampled_from([0, 1, 2]) | st.integers(0, self.longest)
        num_tokens = draw(some | some | st.integers(0, 5 * self.longest) | few)
        page_bytes = draw(st.sampled_from([128, 128, 2048]))
        capacity = num_tokens * token_bytes + draw(st.integers(0, 16)) * page_bytes
        self.most = capacity * draw(st.integers(1, 2))
        max_num_seqs = draw(st.sampled_from([4, 3, 5, 2, 1]))
        config = CacheConfig(
            max_model_len=self.longest,
            max_num_seqs=max_num_seqs + 2 * self.shares,  # outsiders need addresses, too
            capacity_bytes=capacity,
            page_bytes=page_bytes,
            enable_prefix_caching=draw(st.sampled_from([True] * 4 + [False])),
            eviction_policy=draw(st.sampled_from(sorted(EVICTION_POLICIES))),
            max_capacity_bytes=self.most,
            **changed,
        )
        make = STRATEGIES[strategy].make_accounting
        self.watch = Watch(
            lambda: self.resized(make(self.groups, config)),
            max_model_len=self.longest,
            max_num_seqs=max_num_seqs,
            budget=draw(st.integers(20, 64) | st.integers(1, 64) | st.integers(1, 8)),
            watermark_bytes=draw(st.sampled_from([0, 0, 1, 3, 20])) * token_bytes,
            skips=make(self.groups, config).shares_blocks and config.enable_prefix_caching,
            staggered=changed.get("growth") == "staggered",
            policy=draw(st.sampled_from(sorted(POLICIES))),
            headroom=draw(st.sampled_from(HEADROOM)),
            shared_tokens=draw(st.sampled_from([1, 4, 16])),
            prices=draw(st.sampled_from(PRICES)),
            swap_bytes=draw(st.sampled_from([0, 0, self.longest, 3 * self.longest])) * token_bytes,
        )
        self.ends: dict[int, int] = {}  # output tokens, the last of which is EOS
        self.texts: list[list[int]] = [[]]
        self.outside: list[int] = []  # sequences and pins that the scheduler knows nothing of
        self.next_seq = 0

    # -- rules -----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.watch.unfinished) < 8)
    @rule(
        like=st.integers(0, 7),
        cut=st.integers(0, 8) | st.integers(0, 40),
        tails=st.lists(st.integers(1, 2**6) | st.integers(1, 2**30), min_size=1, max_size=3),
        max_tokens=st.integers(12, 40) | st.integers(1, 60),
        ends=st.integers(30, 200) | st.integers(1, 60),
        keys=st.sampled_from(TENANTS),
    )
    def arrive(
        self, like: int, cut: int, tails: list[int], max_tokens: int, ends: int, keys: PrefixKeys
    ) -> None:
        """Requests that begin as one before them did, up to some token."""
        begun = self.texts[like % len(self.texts)][:cut]
        for tail in tails:
            ids = (begun + [1 + int(bit) for bit in f"{tail:b}"])[: self.longest - 1]
            self.texts = [*self.texts[-5:], ids]
            self.ends[self.next_seq] = ends
            self.watch.add(
                Request(
                    request_id=self.next_seq,
                    prompt_token_ids=tuple(ids),
                    params=SamplingParams(max_tokens=max_tokens, n=1 + tail // 7 % 3),
                    keys=keys,
                    priority=tail % 3,
                )
            )
            self.next_seq += 1

    @precondition(lambda self: len(self.watch.unfinished) < 4)
    @rule(
        like=st.integers(0, 7),
        num_sequences=st.integers(2, 6),
        num_prompt_tokens=st.integers(1, 40),
        max_tokens=st.integers(1, 20),
        keys=st.sampled_from(TENANTS),
    )
    def burst(
        self,
        like: int,
        num_sequences: int,
        num_prompt_tokens: int,
        max_tokens: int,
        keys: PrefixKeys,
    ) -> None:
        """Equal prompts, or such as differ at their end, all at once."""
        begun = [*self.texts[like % len(self.texts)][: 8 * (like % 3)], *[1, 2, 2, 1, 1] * 8]
        for number in range(num_sequences):
            ids = [*begun[: num_prompt_tokens - 1], 1 + like * number % 5][: self.longest - 1]
            self.ends[self.next_seq] = 10 + number
            self.watch.add(
                Request(
                    request_id=self.next_seq,
                    prompt_token_ids=tuple(ids),
                    params=SamplingParams(max_tokens=max_tokens),
                    keys=keys,
                    priority=number % 2,
                )
            )
            self.next_seq += 1

    @precondition(lambda self: any(self.computing()))
    @rule()
    def abort_who_computes_for_others(self) -> None:
        self.watch.abort(self.computing()[0])

    @precondition(lambda self: self.watch.unfinished)
    @rule(
        num_steps=st.integers(1, 8) | st.integers(4, 20),
        num_drafts=st.sampled_from([0, 0, 1, 3]),
    )
    def step(self, num_steps: int, num_drafts: int) -> None:
        for _ in range(num_steps):
            if self.watch.scheduler.has_unfinished:
                drafts = {s.seq_id: (1,) * num_drafts for s in self.watch.scheduler.decoding}
                self.watch.step(self.next_token, drafts if num_drafts else NO_DRAFTS)

    @precondition(lambda self: self.watch.unfinished)
    @rule(which=st.integers(0, 7))
    def abort(self, which: int) -> None:
        unfinished = self.watch.unfinished
        self.watch.abort(unfinished[which % len(unfinished)])

    @precondition(lambda self: not self.outside)
    @rule(num_tokens=st.integers(1, 8) | st.integers(1, 40))
    def hold(self, num_tokens: int) -> None:
        """A holder outside of the scheduler takes memory, if there is any."""
        self.watch.accounting.add(-self.next_seq - 1, max_tokens=num_tokens)
        self.watch.accounting.try_extend(-self.next_seq - 1, min(num_tokens, self.longest))
        self.disturb([*self.outside, -self.next_seq - 1])

    @precondition(lambda self: self.paged and len(self.outside) < 3)
    @rule(like=st.integers(0, 7), keys=st.sampled_from(TENANTS))
    def pin(self, like: int, keys: PrefixKeys) -> None:
        ids = np.array(self.texts[like % len(self.texts)], np.int32)
        self.blocks.pin(-self.next_seq - 1, ids, keys)
        self.disturb([*self.outside, -self.next_seq - 1])

    @precondition(lambda self: self.shares and self.watch.unfinished and len(self.outside) < 3)
    @rule(which=st.integers(0, 7))
    def fork(self, which: int) -> None:
        unfinished = self.watch.unfinished
        sequence = unfinished[which % len(unfinished)]
        seq_id = sequence.seq_id
        if self.watch.holds(sequence) and isinstance(
            self.watch.accounting.fork(seq_id, -self.next_seq - 1), Fits
        ):
            self.disturb([*self.outside, -self.next_seq - 1])

    @precondition(lambda self: self.outside)
    @rule()
    def let_go(self) -> None:
        for one in self.outside:
            self.watch.accounting.free(one)
        self.disturb([])

    @rule(share=st.integers(8, 16) | st.integers(0, 16), for_now=st.booleans())
    def resize(self, share: int, for_now: bool) -> None:
        """The machine is short of memory, or an operator has changed the budget."""
        self.watch.accounting.resize(self.most * share // 16, for_now=for_now)
        self.disturb(self.outside)

    def teardown(self) -> None:
        if not hasattr(self, "watch"):
            return
        self.watch.drain(self.next_token)
        assert all(s.finish_reason for s in self.watch.sequences)
        for one in self.outside:
            self.watch.accounting.free(one)
        self.watch.accounting.drain()
        self.watch.accounting.check()
        self.watch.assert_empty()

    # -- what the rules are made of --------------------------------------------------------------

    @property
    def blocks(self) -> Any:
        assert isinstance(self.watch.accounting, PagedAccounting)
        return self.watch.accounting

    def computing(self) -> list[Sequence]:
        """For whom others were held back in the last plan."""
        others = self.watch.scheduler.held_back.values()
        return [s for s in others if s.finish_reason is None]

    def next_token(self, sequence: Sequence) -> int:
        if sequence.num_output_tokens + 1 == self.ends[sequence.request.request_id]:
            return EOS
        return 1 + sum(sequence.token_ids[-3:]) % 2

    def disturb(self, outside: list[int]) -> None:
        """What is held outside of the scheduler, or the budget, has changed."""
        self.next_seq += 1
        self.outside, self.watch.alone = outside, not outside
        self.watch.forgive()
        self.watch.scheduler.check()

    def resized(self, cache: Accounting) -> Accounting:
        """An empty cache as it would be now."""
        if hasattr(self, "watch"):
            cache.resize(self.watch.accounting.ceiling.capacity_bytes)
        return cache
