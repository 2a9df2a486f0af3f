"""Pieces add up to the text, nothing unfinished is shown, and stop strings never leak."""

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.engine.detokenizer import Detokenizer

CORPUS = [
    "def main(arguments):\n    return [argument for argument in arguments]\n",
    "The quick brown fox jumps over the lazy dog. Zwölf Boxkämpfer jagen Viktor quer.",
    "Съешь же ещё этих мягких французских булок. 色は匂へど散りぬるを 👍👍🏽",
]
FAMILY = "\u200d".join("👨👩👧👦")  # four people and three joiners, 25 bytes
REPLACEMENT = "\ufffd"

any_text = st.lists(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from([*"ab. \n", "é", "色", "👍", "\u200d", "🏽", FAMILY, REPLACEMENT]),
    ),
    max_size=30,
).map("".join)


class ByteLevel:
    """A byte-level tokenizer with few merges: characters fall apart, words partly hold together."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer(models.BPE())
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=330,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<eos>"],
            show_progress=False,
        )
        self._tokenizer.train_from_iterator(CORPUS, trainer)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@cache
def tokenizer() -> ByteLevel:
    return ByteLevel()


def pieces(ids: list[int], *, stop: tuple[str, ...] = (), flush: bool = False) -> list[str]:
    """What is shown after each token, up to a stop string; ``flush``: the end brings no token."""
    detokenizer = Detokenizer(tokenizer(), stop=stop)
    shown = []
    for index, token_id in enumerate(ids):
        shown.append(detokenizer.add(token_id, last=not flush and index == len(ids) - 1))
        if detokenizer.stopped:
            return shown
    if flush:
        shown.append(detokenizer.flush())
    return shown


def cut_at_first_stop(text: str, stop: tuple[str, ...]) -> str:
    """The text before the stop string that is complete first, read character by character."""
    for end in range(len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return text[: min(starts)]
    return text


@given(text=any_text, flush=st.booleans())
@example(text=FAMILY * 2, flush=False)
@example(text="a" + REPLACEMENT + "b", flush=False)
@example(text=REPLACEMENT * 3, flush=True)
@settings(deadline=None, max_examples=150)
def test_pieces_add_up_to_the_text(text: str, flush: bool) -> None:
    assert "".join(pieces(tokenizer().encode(text), flush=flush)) == text


@given(text=any_text)
@example(text=FAMILY)
@settings(deadline=None, max_examples=150)
def test_no_piece_shows_half_a_character(text: str) -> None:
    for piece in pieces(tokenizer().encode(text))[:-1]:
        assert REPLACEMENT not in piece or REPLACEMENT in text


@given(ids=st.lists(st.integers(1, 329), max_size=25), flush=st.booleans())
@settings(deadline=None, max_examples=150)
def test_any_tokens_at_all_add_up_to_their_text(ids: list[int], flush: bool) -> None:
    """A model may write bytes that are no text: then the replacement character is the text."""
    assert "".join(pieces(ids, flush=flush)) == tokenizer().decode(ids, skip_special_tokens=True)


def test_half_a_character_is_shown_only_at_the_end() -> None:
    ids = tokenizer().encode("ab色")
    assert len(ids) > 3
    shown = pieces(ids[:-1])
    assert shown[-1] == REPLACEMENT
    assert "".join(shown[:-1]) == "ab"
    assert "".join(pieces(ids[:-1], flush=True)) == "ab" + REPLACEMENT


def test_special_tokens_are_not_text() -> None:
    ids = tokenizer().encode("ab")
    assert "".join(pieces([*ids, 0])) == "ab"
    assert "".join(pieces([0, *ids, 0, *ids])) == "abab"


@st.composite
def text_and_stops(draw: st.DrawFn) -> tuple[str, tuple[str, ...]]:
    text = draw(any_text)
    some = st.text("ab.é👍", min_size=1, max_size=4)
    if text:
        ends = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6))
        some = st.one_of(ends.map(lambda at: text[at[0] : at[0] + at[1]]), some)
    return text, tuple(draw(st.lists(some, min_size=1, max_size=3)))


@given(case=text_and_stops(), flush=st.booleans())
@example(case=("abcd", ("abcd", "bc")), flush=False)
@example(case=("xaab", ("aab",)), flush=False)
@example(case=(FAMILY + "a", ("\u200d",)), flush=False)
@settings(deadline=None, max_examples=300)
def test_a_stop_string_never_leaks(case: tuple[str, tuple[str, ...]], flush: bool) -> None:
    text, stop = case
    shown = "".join(pieces(tokenizer().encode(text), stop=stop, flush=flush))
    assert shown == cut_at_first_stop(text, stop)
    assert not any(s in shown for s in stop)


@given(text=any_text)
@settings(deadline=None, max_examples=100)
def test_only_what_could_begin_a_stop_string_is_held_back(text: str) -> None:
    stop = ("abab",)
    detokenizer, shown = Detokenizer(tokenizer(), stop=stop), ""
    ids = tokenizer().encode(text)
    for index, token_id in enumerate(ids):
        shown += detokenizer.add(token_id)
        certain = tokenizer().decode(ids[: index + 1], skip_special_tokens=True)
        if detokenizer.stopped or certain.endswith(REPLACEMENT):
            continue
        held = certain.removeprefix(shown)
        assert certain == shown + held
        assert stop[0].startswith(held)


def test_nothing_comes_after_the_stop_string() -> None:
    detokenizer = Detokenizer(tokenizer(), stop=("b",))
    for token_id in tokenizer().encode("abc"):
        detokenizer.add(token_id)
    assert detokenizer.stopped
    assert detokenizer.add(tokenizer().encode("z")[0], last=True) == ""
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("length", [2000])
def test_a_long_text_costs_no_more_a_token_than_a_short_one(length: int) -> None:
    """Each token decodes a bounded number of others."""
    decoded = []

    class Counting:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            decoded.append(len(ids))
            return tokenizer().decode(ids, skip_special_tokens=skip_special_tokens)

    detokenizer = Detokenizer(Counting())
    for token_id in tokenizer().encode("ab色👍" * (length // 8)):
        detokenizer.add(token_id)
    assert max(decoded) < 16
