"""Which order has the seat: what LRU would find, what a trial may cost, and kinds of traffic."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kv import order_trials
from quire.kv.counted_hits import EndedHits, LruHits, Run, runs_of
from quire.kv.evidence import Evidence
from quire.kv.order_trials import Order, OrderTrials
from quire.kv.shadow_caches import NEVER, NewcomersFirst
from quire.planner.hit_rates import hit_rate_curve, prompts_of
from quire.planner.hit_rates.policy_replay import PolicyReplay
from quire.traces import TraceRequest

Path = tuple[int, ...]
Prompt = list[int]


# -- what LRU would find ---------------------------------------------------------------------------


def slow_lru(stack: list[Path], prompt: Prompt, size: int) -> tuple[list[Path], int]:
    """Return the stack after a prompt, the last used first, and how many blocks it found there."""
    chain = [tuple(prompt[: n + 1]) for n in range(len(prompt))]
    found = sum(each in stack for each in chain)
    return [*chain, *(each for each in stack if each not in chain)][:size], found


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=40),
    size=st.integers(6, 20),
    rewinds=st.sets(st.integers(0, 39)),
)
def test_last_uses_tell_what_lru_finds(prompts: list[Prompt], size: int, rewinds: set[int]) -> None:
    hits, stack, now = LruHits(size), list[Path](), 1000
    last_used: dict[Path, int] = {}  # whatever was evicted
    for number, prompt in enumerate(prompts):
        now += len(prompt)
        if number in rewinds:  # far less than what was used lately is old
            hits.rewind(10)
            last_used = {path: time - 10 for path, time in last_used.items()}
            now -= 10
        chain = [tuple(prompt[: n + 1]) for n in range(len(prompt))]
        last_uses = np.array([last_used.get(path, NEVER) for path in reversed(chain)])
        stack, wanted = slow_lru(stack, prompt, size)
        assert hits.use(runs_of(last_uses, None, 1), now) == wanted
        last_used.update(dict.fromkeys(chain, now))


def test_the_deepest_blocks_of_a_prompt_are_the_first_that_lru_loses() -> None:
    hits = LruHits(8)

    def use(last_use: int, length: int, now: int) -> int:
        return hits.use(runs_of(np.full(length, last_use), None, 1), now)

    assert use(NEVER, 6, 6) == 0
    assert use(NEVER, 4, 10) == 0  # two of the six are gone
    assert use(6, 6, 16) == 4
    assert use(10, 4, 20) == 2


# -- what would be found if clients were believed --------------------------------------------------


class SlowEnded:
    """Blocks by prefix; those of ended conversations go as if used ``earlier``."""

    def __init__(self, size: int, earlier: float) -> None:
        self.size, self.earlier = size, earlier
        self.held: dict[Path, tuple[int, bool]] = {}  # when it was used, whether it has ended

    def use(self, chain: list[Path], now: int) -> int:
        found = sum(each in self.held for each in chain)
        self.held |= dict.fromkeys(chain, (now, False))
        while len(self.held) > self.size:
            del self.held[min(self.held, key=self._place)]
        return found

    def _place(self, path: Path) -> tuple[float, bool, int, int]:
        when, has_ended = self.held[path]
        return when - (self.earlier if has_ended else 0), not has_ended, when, -len(path)

    def end(self, chain: list[Path]) -> None:
        self.held |= {path: (self.held[path][0], True) for path in chain if path in self.held}


@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(-6, 6)),
        max_size=40,
    ),
    size=st.integers(6, 20),
    earlier=st.sampled_from([1.0, math.inf]),
    begins=st.integers(0, 10),
)
def test_last_uses_tell_what_is_found_if_clients_are_believed(
    prompts: list[tuple[Prompt, int]], size: int, earlier: float, begins: int
) -> None:
    lru, slow, now = LruHits(size), SlowEnded(size, earlier * size), 0
    hits: EndedHits | None = None
    last_used: dict[Path, int] = {}  # whatever was evicted
    have_ended: set[Path] = set()
    for number, (prompt, num_ended) in enumerate(prompts):
        now += len(prompt)
        if number == begins:
            hits = EndedHits(lru, earlier)
        chain = [tuple(prompt[: n + 1]) for n in range(len(prompt))]
        deepest_first = chain[::-1]
        runs = runs_of(
            np.array([last_used.get(path, NEVER) for path in deepest_first]),
            np.array([path in have_ended for path in deepest_first]),
            1,
        )
        lru.use(runs, now)
        wanted = slow.use(chain, now)
        have_ended.difference_update(chain)
        last_used.update(dict.fromkeys(chain, now))
        if hits is None:
            continue
        assert hits.use(runs, now) == wanted
        if num_ended > 0:
            ended = deepest_first[:num_ended]
            hits.end(len(ended), now)
            slow.end(ended)
            have_ended.update(ended)


def test_a_count_outlives_the_clock_being_set_back() -> None:
    lru = LruHits(8)
    hits = EndedHits(lru, 1.0)
    for now in (104, 108):
        assert hits.use(runs_of(np.full(4, NEVER), None, 1), now) == 0
    hits.end(4, 108)
    hits.rewind(100)
    assert hits.use(runs_of(np.full(4, 4), None, 1), 12) == 4
    assert hits.use(runs_of(np.full(4, 8), np.ones(4, bool), 1), 16) == 4


# -- what a trial may cost -------------------------------------------------------------------------


def blocks(count: int, last_use: int = NEVER, *, had_ended: bool = False) -> list[Run]:
    """Return blocks that were used together, for trials whose tick is 1."""
    return [(last_use, had_ended, count)]


def use(trials: OrderTrials, number: int, *, finds: int) -> Order:
    """Use ten blocks that were used 100 uses ago, which LRU finds, and say how many were found."""
    now = 10 * number
    before = blocks(10, now - 1000 if number > 100 else NEVER)
    prints = [10 * (number % 100) + at for at in range(10) if number % 10 < 5]
    return trials.watch(prints, before, finds if number > 100 else 0, now)


def test_an_order_that_finds_less_than_lru_loses_its_seat_before_much_is_lost() -> None:
    trials = OrderTrials(2000, tick=1, gap=1)
    promised = [0.0, 1e6, 0.0]  # a shadow is wrong, and stays wrong
    lost = found = on_trial = 0
    for number in range(20_000):
        trials._won = list(promised)
        finds = 10 if trials.seat is Order.LAST else 2
        use(trials, number, finds=finds)
        if number > 100:
            lost, found = lost + 10 - finds, found + 10
            on_trial += trials.seat is Order.LAST_BUT_ONE
    assert on_trial > 10, "it is tried again and again"
    assert lost <= 40 + 80 + 160 + found / 128, (
        "the stake, a share of LRU's hits, and what is in between"
    )


@pytest.mark.parametrize("length", [10, 200])
def test_a_shadow_that_finds_long_prompts_must_promise_more(length: int) -> None:
    """Four prompts of 200 blocks are 50 of a sample of one in 16."""
    seats = list[Order]()
    for promised in (120.0, 140.0, 160.0):
        trials = OrderTrials(2048, tick=1, gap=1)
        trials._mean_length, trials._won = float(length), [100.0, promised, 0.0]
        seats.append(trials.watch([], blocks(length), 0, length))
    first = seats.index(Order.LAST_BUT_ONE)
    assert first == (1 if length == 10 else 2)


@pytest.mark.parametrize("has_long_prompt", [False, True])
def test_a_lost_trial_is_followed_by_another_one(has_long_prompt: bool) -> None:
    """Also after a long prompt, and where LRU finds a little less than the count of it says."""
    trials = OrderTrials(2000, tick=1, gap=1)
    lost_at, seats = 0, list[Order]()
    for number in range(4000):
        trials._won = [0.0, 1e6, 0.0]
        if number == 200 and has_long_prompt:  # LRU finds all of it
            trials.watch([], blocks(500), 0, 1991)
            trials.watch([], blocks(500, 1991), 0, 1992)
        finds = 10 if number < 200 else 2
        if lost_at:
            finds = 10 if number < lost_at + 200 else 9  # its blocks are there again by then
        seats.append(use(trials, number, finds=finds))
        if number > 100 and not lost_at and seats[-1] is Order.LAST:
            lost_at = number
    assert 200 <= lost_at < 300
    assert Order.LAST_BUT_ONE in seats[lost_at:]


class Told:
    """A pool of 2,000 blocks; ten of each prompt are new, and clients say of half that they end."""

    def __init__(self) -> None:
        self.trials = OrderTrials(2000, tick=1, gap=1)
        self.now = 0

    def ask(self, *, ends: bool) -> None:
        self.now += 10
        self.trials.watch([], blocks(10), 0, self.now)
        if ends:
            self.trials.end(10)

    def again(self, ago: int, *, had_ended: bool, finds: int = 10) -> Order:
        """Use ten blocks that were used ``ago`` prompts ago."""
        self.now += 10
        before = blocks(10, self.now - 10 * ago, had_ended=had_ended)
        return self.trials.watch([], before, finds, self.now)


@pytest.mark.parametrize("come_again", [False, True])
def test_clients_are_believed_at_once_while_what_they_say_comes_true(come_again: bool) -> None:
    """Of three prompts one ends, one goes on, and one comes again: one of those, or an ended."""
    told, seats = Told(), list[Order]()
    for _ in range(60):  # the pool is not full yet: no count tells the orders apart
        told.ask(ends=True)
        told.ask(ends=False)
        seats.append(told.again(2 if come_again else 1, had_ended=come_again))
    assert told.trials._ahead[Order.ENDED_FIRST] == 0
    if come_again:
        assert seats[-1] is Order.LAST
        assert seats.count(Order.LAST) > 55, "the first few tell little"
    else:
        assert seats[-1] is Order.ENDED_FIRST
        for _ in range(60):  # they were right, and are wrong from now on
            told.ask(ends=True)
            told.ask(ends=False)
            seats.append(told.again(2, had_ended=True))
        assert seats[-1] is Order.LAST


@pytest.mark.parametrize(("tells", "least"), [(False, 79), (True, 39)])
def test_an_order_that_heeds_clients_earns_its_stake_before_a_trial(
    tells: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LRU holds 50 rounds, and 100 without the prompts that have ended; what goes on needs 80.

    Twice its stake where what clients say tells nothing of what is used again.
    """
    monkeypatch.setattr(order_trials, "_TELLING", 0.0 if tells else order_trials._TELLING)
    told, asked_at = Told(), list[int]()
    for number in range(200):
        told.ask(ends=True)
        told.ask(ends=True)
        told.again(1, had_ended=True)  # half of what clients say is wrong: they are not believed
        told.ask(ends=False)
        asked_at.append(told.now)
        if number < 80:
            seat = told.trials.seat
            assert seat is Order.LAST or number < 5
            continue
        seat = told.again((told.now - asked_at[-81]) // 10 + 1, had_ended=False, finds=0)
        if seat is not Order.LAST:
            break
    assert seat is Order.ENDED_FIRST
    assert least <= told.trials._ahead[seat] <= least + 21, "some four or eight prompts of ten"


def test_a_trial_that_was_lost_is_paid_from_what_was_counted() -> None:
    told = Told()
    told.ask(ends=True)
    trials = told.trials
    trials._accounts[Order.ENDED_FIRST] = -100.0
    trials._mean_length = 10.0
    seats = list[Order]()
    for ahead in (50.0, 130.0, 150.0):
        trials._ahead[Order.ENDED_FIRST] = ahead
        told.ask(ends=False)
        seats.append(trials.seat)
    assert seats == [Order.LAST, Order.LAST, Order.ENDED_FIRST]
    assert trials._accounts[Order.ENDED_FIRST] == 0
    assert trials._ahead[Order.ENDED_FIRST] < 51, "it is spent"


def test_clients_that_cost_a_stake_are_not_believed_again_without_a_count() -> None:
    told = Told()
    for _ in range(60):
        told.ask(ends=True)
        told.ask(ends=False)
        seat = told.again(1, had_ended=False)
    assert seat is Order.ENDED_FIRST
    seats = [told.again(1, had_ended=False, finds=0) for _ in range(400)]
    assert Order.LAST in seats
    told.trials._accounts = [0.0] * len(Order)
    assert told.again(1, had_ended=False) is not Order.ENDED_FIRST


def told(trials: OrderTrials, earned: float, promised: float, *, num_pools: int = 3) -> Evidence:
    return replace(
        trials.evidence("choice", 1),
        accounts=(0.0, earned, 0.0),
        promises=(0.0, promised, 0.0),
        num_pools=num_pools,
    )


@pytest.mark.parametrize("toggles", [False, True])
def test_others_who_lie_cost_a_bounded_stake(toggles: bool) -> None:
    """As without them, and a quarter of the pool besides, once, however they change their words."""
    trials = OrderTrials(2000, tick=1, gap=1)
    lost = found = on_trial = 0
    for number in range(20_000):
        trials._won = [1e3, 0.0, 0.0]  # its own shadows promise nothing
        says = told(trials, 1e18, 1e18) if number % 40 < 20 or not toggles else None
        trials.hear(says)
        finds = 10 if trials.seat is Order.LAST else 2
        use(trials, number, finds=finds)
        if number > 100:
            lost, found = lost + 10 - finds, found + 10
            on_trial += trials.seat is Order.LAST_BUT_ONE
    assert on_trial > 10, "others are believed"
    assert lost <= 40 + 80 + 160 + found / 128 + 2000 / 4


def test_what_others_have_earned_pays_a_debt() -> None:
    trials = OrderTrials(2000, tick=1, gap=1)
    seats = list[Order]()
    for number in range(700):
        trials._won = [0.0, 1e6, 0.0]
        if number == 500:
            trials.hear(told(trials, 400.0, 0.0))
        finds = 2 if trials.seat is not Order.LAST and number < 500 else 10
        seats.append(use(trials, number, finds=finds))
    assert seats[499] is Order.LAST, "it has lost a trial"
    assert set(seats[500:]) == {Order.LAST_BUT_ONE}


def test_shadows_of_all_pools_are_one_sample() -> None:
    seats = list[Order]()
    for num_pools in (1, 3):
        trials = OrderTrials(2000, tick=1, gap=1)
        trials._won = [100.0, 115.0, 0.0]
        trials.hear(
            replace(told(trials, 0.0, 0.0, num_pools=num_pools), promises=(100.0, 120.0, 0.0))
        )
        seats.append(use(trials, 0, finds=0))
    assert seats == [Order.LAST, Order.LAST_BUT_ONE]
    trials._won = [120.0, 100.0, 0.0]  # one's own sample alone would end it
    assert use(trials, 1, finds=0) is Order.LAST_BUT_ONE
    trials.hear(None)
    assert use(trials, 2, finds=0) is Order.LAST


def test_an_order_that_finds_more_keeps_its_seat_while_it_does() -> None:
    trials = OrderTrials(500, tick=1, gap=1)  # 1,000 blocks go round
    for number in range(3000):
        trials._won = [0.0, 1e6, 0.0]
        assert use(trials, number, finds=5) is Order.LAST_BUT_ONE
    for number in range(3000, 3200):  # then LRU's shadow finds more
        trials._won = [1e6, 1e5, 0.0]
        seat = use(trials, number, finds=5)
    assert seat is Order.LAST


def test_newcomers_go_first_but_for_some() -> None:
    shadow = NewcomersFirst(10)
    found = [shadow.request([number % 12]) for number in range(12 * 50)]
    assert sum(found[-120:]) >= 80  # LRU finds none of them
    found = [shadow.request([100 + number % 8]) for number in range(8 * 400)]
    assert sum(found[-80:]) == 80  # what came first does not stay for good


# -- traffic ---------------------------------------------------------------------------------------


def requests(prompts: list[Prompt]) -> list[TraceRequest]:
    return [
        TraceRequest(
            at_s=at, input_tokens=len(ids), output_tokens=1, hash_ids=tuple(ids), id_tokens=1
        )
        for at, ids in enumerate(prompts)
    ]


class Documents:
    """Prompts of ten blocks, numbered; and traffic that asks for them."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.count = 0

    def new(self, count: int) -> list[Prompt]:
        self.count += count
        return [list(range(10 * n, 10 * n + 10)) for n in range(self.count - count, self.count)]

    def popular(self, count: int, among: list[Prompt]) -> list[Prompt]:
        weights = 1 / np.arange(1, len(among) + 1)
        return [among[at] for at in self.rng.choice(len(among), count, p=weights / weights.sum())]

    def scan(self, count: int) -> list[Prompt]:
        """Each comes once, and between them some that come back."""
        pairs = zip(self.popular(count, self.new(30)), self.new(count), strict=True)
        return [prompt for pair in pairs for prompt in pair]

    def loop(self, rounds: int, length: int) -> list[Prompt]:
        return self.new(length) * rounds

    def twice(self, count: int, spread: int) -> list[Prompt]:
        """Each comes a second time after a while, and never again."""
        documents = self.new(count)
        later = np.arange(count) + spread * self.rng.uniform(0.3, 1.7, count)
        times = np.concatenate([np.arange(count), later])
        return [documents[at % count] for at in np.argsort(times, kind="stable").tolist()]

    def drift(self, count: int, width: float) -> list[Prompt]:
        documents = self.new(count // 5 + 1)
        places = np.arange(count) / 5 + width * self.rng.standard_normal(count)
        return [documents[max(0, min(len(documents) - 1, int(at)))] for at in places]


def conversations(documents: Documents, count: int) -> tuple[list[Prompt], list[bool]]:
    """Conversations of several turns with one of three system prompts; which requests end one."""
    systems = [prompt[:6] for prompt in documents.new(3)]
    asked: list[tuple[float, Prompt, bool]] = []
    for number in range(count):
        prompt, time = list(systems[number % 3]), 3.0 * number
        num_turns = int(documents.rng.geometric(0.3))
        for turn in range(num_turns):
            prompt = [*prompt, *documents.new(1)[0][: documents.rng.integers(2, 10)]]
            asked.append((time, prompt, turn == num_turns - 1))
            time += documents.rng.exponential(300.0)
    asked.sort(key=lambda each: each[0])
    return [prompt for _, prompt, _ in asked], [ends for _, _, ends in asked]


def test_what_clients_know_is_found_and_what_they_say_wrongly_costs_little() -> None:
    documents = Documents(3)
    prompts, ends = conversations(documents, 700)
    replay = PolicyReplay(prompts_of(requests(prompts)))
    wrong = documents.rng.random(len(ends)) < 1 / 3
    third_wrong = [said != lies for said, lies in zip(ends, wrong.tolist(), strict=True)]
    opposite = [not said for said in ends]
    for size in (600, 2000):
        lru = replay.hits(size, "lru")
        assert replay.hits(size, "choice", ended=ends) > 1.1 * lru
        assert replay.hits(size, "choice", ended=third_wrong) >= lru
        assert replay.hits(size, "choice", ended=opposite) >= 0.999 * lru
        assert replay.hits(size, "lru", ended=ends) == lru


def test_a_loop_that_is_larger_than_the_pool_is_found_in_part() -> None:
    """8,800 blocks that are read in a circle, in a pool of 8,000."""
    rates = hit_rate_curve(requests(Documents(0).loop(8, 880)), [8000], ["choice", "lru"])
    assert rates.at("lru", 8000).hit_fraction == 0
    assert rates.at("choice", 8000).hit_fraction >= 0.4


@pytest.mark.parametrize("kind", ["scan", "twice", "drift", "phases"])
def test_little_is_lost_against_lru(kind: str) -> None:
    documents = Documents(7)
    prompts = {
        "scan": lambda: documents.scan(1000),
        "twice": lambda: documents.twice(1500, 60),
        "drift": lambda: documents.drift(2000, 25),
        "phases": lambda: [
            *documents.drift(900, 20),
            *documents.loop(8, 90),
            *documents.twice(600, 60),
            *documents.scan(300),
            *documents.popular(800, documents.new(70)),
        ],
    }[kind]()
    sizes = [300, 700, 1500]
    rates = hit_rate_curve(requests(prompts), sizes, ["choice", "lru"])
    for size in sizes:
        ours, lru = (rates.at(policy, size).hit_tokens for policy in ("choice", "lru"))
        # A trace is short: what trials may cost once is no small part of what it has.
        assert ours >= 0.99 * lru - 100, (kind, size, ours, lru)
    gains = [
        rates.at("choice", size).hit_tokens - rates.at("lru", size).hit_tokens for size in sizes
    ]
    assert kind != "scan" or min(gains[:2]) > 1000
