"""Where chunks end so that a recurrent state can be kept there, and which ones are."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.engine.scheduling.plan_builder import FaultIsolation, StateCheckpoints
from quire.engine.sequence import Request, Sequence
from quire.engine.step_plan import Chunk
from quire.sampling_params import SamplingParams
from quire.spec import FullAttention, Group, RecurrentState, StateTensor

FULL = Group(spec=FullAttention(num_kv_heads=1, head_dim=8, dtype="float32"), layers=(0,))


def state_of(num_bytes: int) -> Group:
    tensor = StateTensor(name="scan", shape=(num_bytes // 4,), dtype="float32")
    return Group(spec=RecurrentState(states=(tensor,)), layers=(1,))


@dataclass
class Cache:
    """As much of an accounting as is asked."""

    groups: tuple[Group, ...]
    state_block_size: int = 16
    kept: list[int] = field(default_factory=list)

    def keep_state(self, seq_id: int) -> bool:
        self.kept.append(seq_id)
        return True


def snapshots(cache: Cache) -> StateCheckpoints:
    return StateCheckpoints(cache)  # type: ignore[arg-type]


def sequence(num_prompt: int, seq_id: int = 0) -> Sequence:
    request = Request(
        request_id=0, prompt_token_ids=tuple(range(num_prompt)), params=SamplingParams()
    )
    made = Sequence(request, seq_id=seq_id)
    made.token_ids = list(range(num_prompt))
    return made


@given(st.integers(0, 200), st.integers(1, 100), st.integers(0, 100))
def test_chunks_end_at_blocks_and_always_get_on(start: int, length: int, more: int) -> None:
    """At most one further, short chunk: what is left behind the last full block."""
    stop, num_tokens = start + length, start + length + more
    end = snapshots(Cache((FULL, state_of(64)))).end(start, stop, num_tokens)
    assert start < end <= stop
    if end < stop:
        assert end % 16 == 0
        assert stop - end <= 16
    if length == 1:
        assert end == stop
    if more == 0 and end < stop:  # the last token, which no hit covers, is to come
        rest = snapshots(Cache((FULL, state_of(64)))).end(end, stop, num_tokens)
        assert rest == stop


def test_without_states_chunks_end_where_they_would() -> None:
    assert snapshots(Cache((FULL,), state_block_size=0)).end(0, 99, 99) == 99


def step_through(cache: Cache, num_prompt: int, num_tokens: int, budget: int) -> list[int]:
    """The tokens after which a state is kept, of a sequence that comes so far."""
    rule, own, kept = snapshots(cache), sequence(num_prompt), []
    own.token_ids += [7] * (num_tokens - num_prompt)
    start = 0
    while start < num_tokens:
        most = num_prompt if start < num_prompt else start + 1
        stop = rule.end(start, min(most, start + budget), most)
        own.num_computed_tokens = stop
        chunk: Any = Chunk(sequence=own, start=start, stop=stop, samples=False)
        before = len(cache.kept)
        rule.keep(cache, [chunk])  # type: ignore[arg-type]
        kept += [stop] * (len(cache.kept) - before)
        start = stop
    return kept


def test_copies_take_no_more_than_the_keys_between_them() -> None:
    """A token's keys are 64 bytes; a state of 4,096 bytes is worth 64 tokens."""
    cheap, dear = (FULL, state_of(64)), (FULL, state_of(4096))
    # Each full block of the answer, and the last one of the prompt.
    assert step_through(Cache(cheap), 40, 100, 1000) == [32, 48, 64, 80, 96]
    assert step_through(Cache(dear), 40, 300, 1000) == [32, 64, 128, 192, 256]
    # A long prompt comes in chunks; those that cross a multiple are kept, and the last block.
    assert step_through(Cache(dear), 200, 201, 48) == [96, 144, 192]
    assert step_through(Cache((state_of(4096),)), 40, 9000, 8192) == [32, 4096, 8192]
    # Chunks may be shorter than a block.
    assert step_through(Cache(cheap), 40, 41, 5) == [16, 32]


def test_suspects_are_acquitted_when_they_have_come_further() -> None:
    suspects, first, second = FaultIsolation(), sequence(9, 1), sequence(9, 2)
    suspects.add(first, 5)
    assert suspects
    assert first in suspects
    assert second not in suspects
    assert suspects.among([second, first], or_all=False) == [first]
    assert suspects.among([second], or_all=True) == [second]
    assert suspects.among([second], or_all=False) == []
    first.num_computed_tokens = 4
    suspects.acquit()
    assert first in suspects
    first.num_computed_tokens = 5
    suspects.acquit()
    assert not suspects
    suspects.add(second, 5)
    second.finish_reason = "abort"
    suspects.acquit()
    assert not suspects
