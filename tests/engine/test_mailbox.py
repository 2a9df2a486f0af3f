"""What waits for a reader: nothing is lost, nothing is mixed, and it does not pile up."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.outputs import TextDelta
from quire.engine.request_tracker import OutputCollector
from quire.engine.sequence import TokenLogprobs

CHOICES = 3
PIECES = st.lists(
    st.tuples(
        st.integers(0, CHOICES - 1),
        st.text(max_size=3),
        st.lists(st.integers(0, 9), max_size=2),
    ),
    max_size=40,
)


def delta(choice: int, text: str, token_ids: list[int], *, last: bool = False) -> TextDelta:
    return TextDelta(
        index=0,
        choice=choice,
        text=text,
        token_ids=tuple(token_ids),
        logprobs=tuple(TokenLogprobs(token_id=i, logprob=-i, rank=1) for i in token_ids),
        finish_reason="length" if last else None,
        detail="full" if last else "",
        num_cached_tokens=choice,
    )


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@given(pieces=PIECES, reads=st.sets(st.integers(0, 40)))
def test_pieces_arrive_whole_however_late_they_are_read(
    loop: asyncio.Runner, pieces: list[tuple[int, str, list[int]]], reads: set[int]
) -> None:
    async def run() -> list[list[TextDelta]]:
        mailbox, taken = OutputCollector(), []
        several = [delta(*piece) for piece in pieces]
        several += [delta(choice, "", [], last=True) for choice in range(CHOICES)]
        for place, each in enumerate(several):
            mailbox.put(each)
            if place in reads or place == len(several) - 1:
                taken.append(await mailbox.take())
        return taken

    taken = loop.run(run())
    assert all(len({d.choice for d in batch}) == len(batch) <= CHOICES for batch in taken)
    for choice in range(CHOICES):
        own = [d for batch in taken for d in batch if d.choice == choice]
        want = [piece for piece in pieces if piece[0] == choice]
        assert "".join(d.text for d in own) == "".join(text for _, text, _ in want)
        token_ids = [token_id for _, _, several in want for token_id in several]
        assert [i for d in own for i in d.token_ids] == token_ids
        assert [each.token_id for d in own for each in d.logprobs] == token_ids
        assert [d.finish_reason for d in own[:-1]] == [None] * (len(own) - 1)
        assert (own[-1].finish_reason, own[-1].detail) == ("length", "full")
        assert {d.num_cached_tokens for d in own} == {choice}


def test_log_probabilities_of_the_prompt_come_with_the_first_piece_that_is_read() -> None:
    async def run() -> list[TextDelta]:
        mailbox = OutputCollector()
        told = (TokenLogprobs(token_id=1, logprob=-1, rank=1),)
        mailbox.put(replace(delta(0, "a", [1]), prompt_logprobs=told))
        mailbox.put(delta(0, "b", [2]))
        return await mailbox.take()

    (taken,) = asyncio.run(run())
    assert (taken.text, len(taken.prompt_logprobs)) == ("ab", 1)


def test_a_lone_piece_is_handed_on_as_it_is() -> None:
    async def run() -> bool:
        mailbox, piece = OutputCollector(), delta(0, "a", [1])
        mailbox.put(piece)
        (taken,) = await mailbox.take()
        return taken is piece

    assert asyncio.run(run())


def test_an_error_comes_after_all_that_came_before_it() -> None:
    async def run() -> None:
        mailbox = OutputCollector()
        mailbox.put(delta(0, "a", [1]))
        mailbox.fail(ValueError("the end"))
        assert [d.text for d in await mailbox.take()] == ["a"]
        for _ in range(2):
            with pytest.raises(ValueError, match="the end"):
                await mailbox.take()

    asyncio.run(run())


def test_a_waiting_reader_is_woken_and_an_early_ring_is_not_lost() -> None:
    async def run() -> list[str]:
        mailbox = OutputCollector()
        reader = asyncio.ensure_future(mailbox.take())
        await asyncio.sleep(0)
        OutputCollector.ring([mailbox])  # with nothing in it: it goes on waiting
        await asyncio.sleep(0)
        assert not reader.done()
        mailbox.put(delta(0, "b", [2]))
        OutputCollector.ring([mailbox])
        return [d.text for d in await reader]

    assert asyncio.run(run()) == ["b"]
