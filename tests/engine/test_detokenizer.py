"""Pieces add up to the text, nothing unfinished is shown, and stop strings never leak."""

from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from conformance.covering import examples
from quire.engine.detokenizer import Detokenizer
from quire.engine.outputs import Listener, TextDelta
from quire.engine.sequence import Request, Sequence
from quire.engine.step_plan import TokenOutput
from quire.sampling_params import SamplingParams

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


def made(codec: Any = None, **params: Any) -> Detokenizer:
    """``codec``: what decodes, if not the byte-level tokenizer."""
    return Detokenizer(codec or tokenizer(), SamplingParams(max_tokens=10_000, **params))


def pieces(ids: list[int], *, flush: bool = False, codec: Any = None, **params: Any) -> list[str]:
    """What is shown after each token, up to a stop string; ``flush``: the end brings no token."""
    detokenizer = made(codec, **params)
    shown = []
    for index, token_id in enumerate(ids):
        shown.append(detokenizer.add(token_id, last=not flush and index == len(ids) - 1))
        if detokenizer.stopped_by is not None:
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
@settings(deadline=None, max_examples=examples(50, of=150))
def test_pieces_add_up_to_the_text(text: str, flush: bool) -> None:
    assert "".join(pieces(tokenizer().encode(text), flush=flush)) == text


@given(text=any_text)
@example(text=FAMILY)
@settings(deadline=None, max_examples=examples(50, of=150))
def test_no_piece_shows_half_a_character(text: str) -> None:
    for piece in pieces(tokenizer().encode(text))[:-1]:
        assert REPLACEMENT not in piece or REPLACEMENT in text


@given(ids=st.lists(st.integers(1, 329), max_size=25), flush=st.booleans())
@settings(deadline=None, max_examples=examples(50, of=150))
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
    assert "".join(pieces([0, *ids, 0], skip_special_tokens=False)) == "<eos>ab<eos>"


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
@settings(deadline=None, max_examples=examples(100, of=300))
def test_a_stop_string_never_leaks(case: tuple[str, tuple[str, ...]], flush: bool) -> None:
    text, stop = case
    shown = "".join(pieces(tokenizer().encode(text), stop=stop, flush=flush))
    assert shown == cut_at_first_stop(text, stop)
    assert not any(s in shown for s in stop)


@given(text=any_text)
@settings(deadline=None, max_examples=examples(40, of=100))
def test_only_what_could_begin_a_stop_string_is_held_back(text: str) -> None:
    stop = ("abab",)
    detokenizer, shown = made(stop=stop), ""
    ids = tokenizer().encode(text)
    for index, token_id in enumerate(ids):
        shown += detokenizer.add(token_id)
        certain = tokenizer().decode(ids[: index + 1], skip_special_tokens=True)
        if detokenizer.stopped_by is not None or certain.endswith(REPLACEMENT):
            continue
        held = certain.removeprefix(shown)
        assert certain == shown + held
        assert stop[0].startswith(held)


def test_nothing_comes_after_the_stop_string() -> None:
    detokenizer = made(stop=("b",))
    for token_id in tokenizer().encode("abc"):
        detokenizer.add(token_id)
    assert detokenizer.stopped_by is not None
    assert detokenizer.add(tokenizer().encode("z")[0], last=True) == ""
    assert detokenizer.flush() == ""


@given(case=text_and_stops(), flush=st.booleans())
@settings(max_examples=examples(40, of=100))
def test_a_stop_string_can_be_part_of_the_text(
    case: tuple[str, tuple[str, ...]], flush: bool
) -> None:
    """What comes after the one that is complete first still does not."""
    text, stop = case
    shown = "".join(
        pieces(tokenizer().encode(text), stop=stop, flush=flush, include_stop_str_in_output=True)
    )
    assert text.startswith(shown)
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(stop)]
    assert len(shown) == min(ends, default=len(text))


@given(case=text_and_stops(), min_tokens=st.integers(0, 12))
@settings(max_examples=examples(70, of=200))
def test_before_min_tokens_no_stop_string_counts(
    case: tuple[str, tuple[str, ...]], min_tokens: int
) -> None:
    """It counts if a later token completes it, even where it began before."""
    text, stop = case
    ids = tokenizer().encode(text)
    shown = "".join(pieces(ids, stop=stop, min_tokens=min_tokens))
    plain = made()
    certain = len("".join(plain.add(token_id) for token_id in ids[:min_tokens]))
    ends = [end for end in range(certain + 1, len(text) + 1) if text[:end].endswith(stop)]
    if len(ids) <= min_tokens or not ends:
        assert shown == text
    else:
        starts = [ends[0] - len(s) for s in stop if text[: ends[0]].endswith(s)]
        assert shown == text[: min(starts)]


class OneByteEach:
    """A token a byte, as a tokenizer with byte fallback: no text is half a character."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode(errors="replace")


SOME_BYTES = (b"a", b"\xff", b"\xe8", b"\x89", "色".encode(), "👍".encode())


@given(data=st.lists(st.sampled_from(SOME_BYTES)))
@example(data=["👍".encode()] * 5 + [b"\xf0\x9f"] * 9)
@example(data=[b"\xff"] * 40)
@settings(max_examples=examples(70, of=200))
def test_bytes_that_are_no_text_read_as_in_one_piece(data: list[bytes]) -> None:
    ids = list(b"".join(data))
    assert "".join(pieces(ids, codec=OneByteEach())) == bytes(ids).decode(errors="replace")


class AcrossCharacters:
    """A token that is the end of one character and the beginning of the next, so none is whole."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return b"".join([b"\xe8", b"\x89\xb2\xe8", b"\x89\xb2"][i] for i in ids).decode(
            errors="replace"
        )


def test_text_is_shown_even_where_no_token_ends_with_a_character() -> None:
    shown = pieces([0, *[1] * 50, 2], codec=AcrossCharacters())
    assert "".join(shown) == "色" * 51
    assert max(map(len, shown)) <= 6


@pytest.mark.parametrize(
    ("codec", "ids"),
    [
        (ByteLevel(), ByteLevel().encode("ab色👍" * 250)),
        (OneByteEach(), [0xFF] * 2000),
        (OneByteEach(), [0xE8] * 2000),
        (AcrossCharacters(), [1] * 2000),
    ],
    ids=["text", "no text", "halves", "across"],
)
def test_a_long_text_costs_no_more_a_token_than_a_short_one(codec: Any, ids: list[int]) -> None:
    """Each token decodes a bounded number of others, a bounded number of times."""
    decoded = []

    class Counting:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            decoded.append(len(ids))
            text: str = codec.decode(ids, skip_special_tokens=skip_special_tokens)
            return text

    detokenizer = made(Counting())
    for token_id in ids:
        detokenizer.add(token_id)
    assert max(decoded) < 16
    assert len(decoded) <= 2 * len(ids)


# -- what a listener makes of it ------------------------------------------------------------------


def heard(outputs: list[tuple[int | None, bool, str | None]], **params: Any) -> list[TextDelta]:
    """Pieces of a sequence's text; outputs are (token, whether it is text, why it ends)."""
    request = Request(request_id=1, prompt_token_ids=(5,), params=SamplingParams(**params))
    sequence, deltas = Sequence(request, seq_id=1), []
    listener = Listener(sequence, tokenizer(), 0, deltas.append)
    for token_id, is_text, reason in outputs:
        output = TokenOutput(
            sequence=sequence, token_id=token_id, is_text=is_text, finish_reason=reason
        )
        if listener.hear(output):
            break
    return deltas


def test_a_token_that_only_ends_the_text_is_no_part_of_it() -> None:
    a, b = tokenizer().encode("a"), tokenizer().encode("b")
    outputs = [(a[0], True, None), (b[0], False, "stop")]
    for params, text in (({}, "a"), ({"include_stop_str_in_output": True}, "ab")):
        deltas = heard(outputs, **params)
        assert "".join(delta.text for delta in deltas) == text
        assert [delta.token_id for delta in deltas] == [a[0], b[0]]
        assert deltas[-1].finish_reason == "stop"


def test_what_a_stop_string_held_back_is_shown_when_another_end_comes() -> None:
    ids = tokenizer().encode("xyab")
    outputs = [(token_id, True, None) for token_id in ids]
    for end in ((0, False, "stop"), (None, True, "abort")):
        assert "".join(d.text for d in heard([*outputs, end], stop="abc")) == "xyab"
    deltas = heard([*outputs, (tokenizer().encode("c")[0], True, None)], stop="abc")
    assert "".join(delta.text for delta in deltas) == "xy"
    assert deltas[-1].finish_reason == "stop"
