"""Where requests go: what is found, what is queued, what was promised, and who is told of it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.told import KEY, Prompt, groups_of, on_the_wire
from quire.fleet.placement import (
    _NEW_TOKENS,
    LeastLoaded,
    Load,
    Loads,
    Placed,
    Placement,
    PrefixAware,
    RoundRobin,
)
from quire.fleet.prefix_directory import PrefixDirectory
from quire.kv import PrefixKeys

SIZE = 4
GROUPS = groups_of()
NAMES = ("a", "b", "c")
LONG = tuple(range(400))


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """A placement by prefixes, and replicas that tell what they have."""

    def __init__(self, **options) -> None:
        self.clock = Clock()
        self.directory = PrefixDirectory(GROUPS, SIZE, key=KEY, **options)
        self.placement = PrefixAware(self.directory, clock=self.clock, seed=1)

    def store(self, replica: str, prompt: Prompt, num_blocks: int, medium="GPU") -> None:
        events = prompt.stored(SIZE, range(num_blocks), medium=medium)
        self.directory.apply(replica, on_the_wire(GROUPS, SIZE, events))

    def place(self, token_ids=LONG, *, names=NAMES, **more):
        keys = more.pop("keys", PrefixKeys())
        return self.placement.place(token_ids, keys, names, **more)


def all_of_them() -> list[Placement]:
    return [RoundRobin(), LeastLoaded(seed=1), World().placement]


@pytest.mark.parametrize("placement", all_of_them(), ids=lambda each: type(each).__name__)
def test_each_chooses_a_candidate_and_takes_back_twice(placement: Placement) -> None:
    for turn in range(8):
        placed = placement.place(LONG, PrefixKeys(), NAMES[turn % 3 :], session="s")
        assert placed.replica in NAMES[turn % 3 :]
        assert placed.computed_tokens == len(LONG)
        for _ in range(2):
            placement.note_first_token(placed)
            placement.note_end(placed)
    placement.report("a", Load(num_running=3))
    placement.forget("a")
    placement.note_end(placed)
    with pytest.raises(ValueError, match="no replica"):
        placement.place(LONG, PrefixKeys(), ())


@pytest.mark.parametrize("placement", all_of_them(), ids=lambda each: type(each).__name__)
def test_a_burst_spreads_before_anyone_has_reported(placement: Placement) -> None:
    placed = [placement.place((n,) * 40, PrefixKeys(), NAMES) for n in range(9)]
    assert {name: [p.replica for p in placed].count(name) for name in NAMES} == dict.fromkeys(
        NAMES, 3
    )


def test_one_that_comes_back_is_read_where_it_is_now() -> None:
    placement = LeastLoaded(seed=1)
    placement.note_end(placement.place((1,), PrefixKeys(), ["a", "b"]))
    placement.forget("a")
    for name, num_running in (("c", 0), ("b", 3), ("a", 5)):  # "c" has the place of "a"
        placement.report(name, Load(num_running=num_running))
    assert placement.place((1,), PrefixKeys(), ["a", "b"]).replica == "b"


def test_the_longest_prefix_wins_and_is_told_by_medium() -> None:
    world = World()
    world.store("a", Prompt(LONG), 20)
    world.store("b", Prompt(LONG), 50)
    world.store("b", Prompt(LONG), 60, medium="CPU")
    placed = world.place()
    assert (placed.replica, placed.found_tokens) == ("b", {"GPU": 200, "CPU": 40})
    assert world.place(names=("a", "c")).found_tokens == {"GPU": 80}


def test_the_last_token_is_always_computed() -> None:
    world = World()
    world.store("c", Prompt(LONG), 100)
    placed = world.place()
    assert (placed.replica, placed.computed_tokens) == ("c", 1)
    world.store("a", Prompt(LONG), 20)
    world.store("a", Prompt(LONG), 60, medium="CPU")
    assert world.place(LONG[:200], names=("a",)).found_tokens == {"GPU": 80, "CPU": 119}


@pytest.mark.parametrize(("queued_tokens", "is_waited_for"), [(1700, True), (2100, False)])
def test_a_queue_can_be_too_long_for_what_is_found(queued_tokens, is_waited_for) -> None:
    """200 tokens more to compute weigh as much as nine times as many that wait."""
    world = World()
    world.store("a", Prompt(LONG), 50)
    world.placement.report("a", Load(queued_tokens=queued_tokens))
    assert (world.place().replica == "a") is is_waited_for


def test_a_prefix_that_is_gone_draws_its_prompt_where_it_was_sent() -> None:
    world = World()
    first = world.place()
    world.placement.note_end(first)
    busy = Load(queued_tokens=1000)
    world.placement.report(first.replica, busy)
    again = world.place()
    assert (again.replica, again.found_tokens) == (first.replica, {})
    assert world.place((5,) * 400).replica != first.replica
    world.placement.forget(first.replica)
    world.placement.report(first.replica, busy)
    assert world.place(LONG[:200]).replica != first.replica


def one_after_the_other(world: World, num: int, names: tuple[str, ...]) -> Counter[str]:
    """Place prompts that share a block and end apart, each when the last has ended."""
    sent = Counter[str]()
    for n in range(num):
        prompt = (*range(SIZE), *range(1000 * n + 1000, 1000 * n + 1200))
        placed = world.place(prompt, names=names)
        world.store(placed.replica, Prompt(prompt), len(prompt) // SIZE)
        world.placement.report(placed.replica, Load())
        world.placement.note_end(placed)
        sent[placed.replica] += 1
    return sent


def test_prompts_that_share_little_fill_all_caches() -> None:
    """Though no replica has anything to do: the one that has their first block is not flooded."""
    names = tuple("abcdefgh")
    sent = one_after_the_other(World(), 64, names)
    assert sorted(sent) == list(names)
    assert max(sent.values()) <= 16


def test_a_cache_that_is_new_is_filled() -> None:
    world = World()
    one_after_the_other(world, 40, ("a", "b", "c"))
    world.placement.forget("b")
    world.placement.report("d", Load())
    assert one_after_the_other(world, 12, ("a", "b", "c", "d")).keys() >= {"b", "d"}


def test_what_was_computed_long_ago_counts_no_more() -> None:
    """So many tokens as all caches hold are remembered, the latest most."""
    loads = Loads(Clock())
    for number, name in enumerate("a" + 40 * "b"):
        placed = Placed(number=number, replica=name, num_prompt_tokens=100)
        loads.note_new(placed, held_tokens=1000)
    loads.report("b", Load())
    of_a, of_b = loads.of(("a", "b"))[_NEW_TOKENS]
    assert 0 < of_a < 5
    assert 900 < of_b < 1100


def test_a_slow_replica_is_told_by_its_own_figures() -> None:
    world = World()
    world.placement.report("a", Load(compute_s_per_token=1e-3))
    world.placement.report("b", Load(compute_s_per_token=1e-3))
    assert {world.place().replica for _ in range(4)} == {"c"}


def test_what_is_loaded_costs_what_loading_was_measured_to_cost() -> None:
    world = World()
    world.store("a", Prompt(LONG), 100, medium="STORAGE")
    assert world.place().replica == "a"
    world.placement.report("a", Load(load_s_per_block={"STORAGE": 1.0}))
    assert world.place().replica != "a"


def test_a_full_replica_is_waited_for_as_long_as_requests_run() -> None:
    world = World()
    placed = world.place((1,), names=("b",))
    world.clock.now_s += 10
    world.placement.note_end(placed)
    for name in NAMES:
        world.placement.report(name, Load(num_running=2, max_num_seqs=2))
    world.placement.report("c", Load(num_running=1, max_num_seqs=2, queued_tokens=500))
    assert world.place().replica == "c"


def test_a_prompt_that_is_being_computed_counts_as_found_there() -> None:
    """Until its first token; then events say what is there."""
    world = World()
    first = world.place()
    again = world.place()
    assert again.replica == first.replica
    assert again.found_tokens == {"GPU": pytest.approx(399, abs=60)}
    other = world.place(LONG[:8] + (7,) * 392, names=(first.replica,))
    assert other.found_tokens == {"GPU": 8}
    for placed in (first, again):
        world.placement.note_first_token(placed)
    assert not world.place(names=(first.replica,)).found_tokens.get("CPU")
    world.placement.forget(first.replica)
    assert not World().place().found_tokens


def test_promises_leave_nothing_behind() -> None:
    world = World()
    several = [world.place(LONG[: 30 * n]) for n in range(1, 12)]
    for placed in several[:6]:
        world.placement.note_end(placed)
    for name in NAMES:
        world.placement.forget(name)
    assert not world.placement._promises._replicas
    assert not world.placement._promises._open


def test_a_session_stays_among_equals_only() -> None:
    world = World()
    first = world.place((1, 2), session="s").replica
    assert {world.place((3, 4), session="s").replica for _ in range(5)} == {first}
    world.placement.report(first, Load(queued_tokens=10_000))
    assert world.place((5, 6), session="s").replica != first


def test_tenants_are_found_by_the_fleets_key_and_never_mixed() -> None:
    ann, bob = PrefixKeys(tenant="ann"), PrefixKeys(tenant="bob")
    world = World()
    world.store("a", Prompt(LONG, ann), 50)
    world.store("b", Prompt(LONG, bob), 20)
    assert world.place(keys=ann).found_tokens == {"GPU": 200}
    assert world.place(keys=bob).found_tokens == {"GPU": 80}
    assert not world.place(keys=PrefixKeys(tenant="eve")).found_tokens
    assert not world.place().found_tokens


def test_a_report_replaces_what_was_counted_but_for_what_is_on_its_way() -> None:
    world = World()
    loads = world.placement._loads
    old = world.place()
    world.clock.now_s += 1
    new = world.place(names=(old.replica,))
    world.placement.report(old.replica, Load(num_running=1, queued_tokens=30))
    assert loads.queued_tokens(old.replica) == 30 + new.computed_tokens
    assert loads.num_requests(old.replica) == 2
    world.clock.now_s += 1
    world.placement.report(old.replica, Load(num_running=2, queued_tokens=50, age_s=1))
    assert loads.queued_tokens(old.replica) == 50 + new.computed_tokens


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["place", "token", "end", "report", "forget"]),
            st.integers(0, 20),
            st.sampled_from(NAMES),
        ),
        max_size=40,
    )
)
def test_counts_never_go_below_nothing(done) -> None:
    world, placed = World(), []
    for what, number, name in done:
        if what == "place":
            placed.append(world.place(LONG[: 20 * number + 1], session=str(number)))
        elif what == "report":
            world.placement.report(name, Load(num_running=number, queued_tokens=number))
        elif what == "forget":
            world.placement.forget(name)
        elif placed:
            note = world.placement.note_end if what == "end" else world.placement.note_first_token
            note(placed[number % len(placed)])
        world.clock.now_s += 0.03
    for each in placed:
        world.placement.note_end(each)
    loads = world.placement._loads
    for name in NAMES:
        assert loads.queued_tokens(name) >= 0
        assert loads.num_requests(name) >= 0
        assert not loads.num_open(name)
    assert not world.placement._promises._replicas
