"""What the sampler chooses, against its slow twin; and that nothing else in a batch matters."""

import math
from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance.covering import examples
from engine.sampling.cases import (
    EOS,
    VOCAB,
    any_batch,
    assert_follows,
    plan_of,
    row_of,
    rows,
    sampler_of,
    sequence,
)
from quire.engine.sequence import Sequence
from quire.engine.step_plan import Chunk, Draw, PromptRows, Sampled, StepPlan

pytestmark = pytest.mark.usefixtures("way")


def tokens_of(logits: Tensor, sequences: Several[Sequence], seed: int = 0) -> list[int]:
    results = sampler_of(seed, EOS).sample(logits, plan_of(sequences))
    assert not any(result.error for result in results)
    return [result.token_ids[0] for result in results]


# -- against the twin -----------------------------------------------------------------------------


def expected(own: Sequence, drafts: tuple[int, ...], logits: Tensor) -> tuple[Sampled, bool]:
    """From the twin: what a draw gives, and whether that is certain."""
    tokens: list[int] = []
    found = []
    certain = True
    for place in range(len(drafts) + 1):
        row = row_of(own, logits[place], drafts[:place])
        if max(row.edited()) == -math.inf:
            break
        tokens.append(row.token())
        certain &= row.certain
        if own.request.params.logprobs is not None:
            found.append(row.logprobs(tokens[-1], own.request.params.logprobs))
        if tokens[place : place + 1] != list(drafts[place : place + 1]):
            break
    error = "" if tokens else "no token is allowed"
    return Sampled(token_ids=tuple(tokens), logprobs=tuple(found), error=error), certain


@given(batch=any_batch())
@settings(max_examples=examples(50, of=150))
def test_every_row_is_what_the_twin_chooses(
    batch: tuple[list[Sequence], list[tuple[int, ...]], Tensor],
) -> None:
    sequences, drafts, logits = batch
    plan = plan_of(sequences, drafts)
    results = sampler_of(0, EOS).sample(logits, plan)
    num_certain = 0
    for draw, result in zip(plan.draws, results, strict=True):
        want, certain = expected(draw.sequence, draw.drafts, logits[draw.row :])
        if not certain:
            continue
        num_certain += 1
        assert result.token_ids == want.token_ids
        assert result.error.startswith(want.error)
        assert bool(result.error) == bool(want.error)
        for found, own in zip(result.logprobs, want.logprobs, strict=True):
            assert (found.token_id, found.rank) == (own.token_id, own.rank)
            assert found.logprob == pytest.approx(own.logprob, abs=1e-5)
            assert [t for t, _ in found.top] == [t for t, _ in own.top]
            assert [p for _, p in found.top] == pytest.approx([p for _, p in own.top], abs=1e-5)
    assume(num_certain)


def same(found: list[Sampled], want: list[Sampled]) -> bool:
    """NaN and all. How many rows a GPU works on may decide how it rounds a row's norm."""
    if sampler_of.way == "cuda":
        found, want = ([rounded(result) for result in several] for several in (found, want))
    return repr(found) == repr(want)


def rounded(result: Sampled) -> Sampled:
    told = (
        replace(own, logprob=round(own.logprob, 6), top=tuple((t, round(p, 6)) for t, p in own.top))
        for own in result.logprobs
    )
    return replace(result, logprobs=tuple(told))


@given(batch=any_batch())
@settings(max_examples=25)
def test_a_step_done_twice_gives_the_same(
    batch: tuple[list[Sequence], list[tuple[int, ...]], Tensor],
) -> None:
    sequences, drafts, logits = batch
    plan, sampler = plan_of(sequences, drafts), sampler_of(0, EOS)
    before = logits.clone()
    first = sampler.sample(logits, plan)
    assert same(sampler.sample(logits, plan), first)
    assert torch.equal(logits, before), "the logits were written to"
    alone = [
        sampler_of(0, EOS).sample(
            logits[draw.row : draw.row + len(draw.drafts) + 1],
            plan_of([draw.sequence], [draw.drafts]),
        )[0]
        for draw in plan.draws
    ]
    assert same(alone, first)


@given(batch=any_batch(), drafted=st.randoms(use_true_random=False))
@settings(max_examples=15)
def test_what_is_kept_between_steps_is_what_a_new_sampler_finds(
    batch: tuple[list[Sequence], list[tuple[int, ...]], Tensor], drafted: Any
) -> None:
    """Sequences grow, lose what is remembered of them, and get another text under the same id."""
    sequences, _, logits = batch
    vocab, sampler = logits.shape[-1], sampler_of(0, EOS)
    logits = logits[: len(sequences)]
    for _ in range(6):
        found = sampler.sample(logits, plan_of(sequences))
        assert same(found, sampler_of(0, EOS).sample(logits, plan_of(sequences)))
        for own in sequences:
            own.token_ids.append(drafted.randrange(vocab))
        chosen = drafted.choice(sequences)
        if drafted.random() < 0.3:
            sampler.forget(chosen)
        elif drafted.random() < 0.3:
            prompt = list(chosen.request.prompt_token_ids)
            chosen.token_ids = [*prompt, *drafted.choices(range(vocab), k=chosen.num_output_tokens)]


# -- the same text, whatever happens --------------------------------------------------------------


def model(token_ids: list[int], vocab: int = VOCAB) -> Tensor:
    """Logits that depend on the last tokens, so that what was chosen shows in all that follows."""
    numbers = np.random.default_rng([len(token_ids), *token_ids[-3:]])
    return torch.from_numpy(numbers.integers(-12, 13, vocab) / 4).float()


def text_of(
    own: Sequence,
    num_tokens: int = 12,
    *,
    company: Several[Sequence] = (),
    guess: Any = lambda token_ids: (),
    forgets: bool = False,
) -> list[int]:
    """What a sequence becomes, in the middle of others, with guesses at what comes next."""
    sampler = sampler_of(0, EOS)
    while own.num_output_tokens < num_tokens:
        batch = [*company[::2], own, *company[1::2]]
        drafts = [guess(each.token_ids) if each is own else () for each in batch]
        logits = torch.stack(
            [
                model(each.token_ids + list(some[:place]))
                for each, some in zip(batch, drafts, strict=True)
                for place in range(len(some) + 1)
            ]
        )
        for each, result in zip(batch, sampler.sample(logits, plan_of(batch, drafts)), strict=True):
            assert not result.error
            each.token_ids += result.token_ids
        if forgets:
            sampler.forget(own)
    return own.output_token_ids[:num_tokens]


ALL_KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"top_p": 0.8},
    {"top_k": 5, "temperature": 0.7},
    {"min_p": 0.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "min_tokens": 8, "stop_token_ids": (2, 7)},
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    {"logit_bias": {4: 2.0, 9: -3.0}, "bad_words": ((5,), (4, 4), (9, 1, 2)), "min_p": 0.1},
]
kinds = pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: ",".join(kind) or "plain")


@kinds
def test_the_text_is_the_same_alone_in_a_batch_forgotten_and_forked(kind: dict[str, Any]) -> None:
    alone = text_of(sequence(**kind, seed=7))
    company = [sequence(seq_id=9 + i, **other) for i, other in enumerate(ALL_KINDS)]
    assert text_of(sequence(**kind, seed=7), company=company) == alone
    assert text_of(sequence(**kind, seed=7), forgets=True) == alone
    fork = sequence(output=alone[:5], **kind, seed=7, seq_id=3)
    assert text_of(fork) == alone
    if fork.request.params.temperature:
        assert text_of(sequence(**kind, seed=8)) != alone


@kinds
@given(seed=st.integers(0, 2**32), random=st.randoms(use_true_random=False))
@settings(max_examples=8)
def test_guesses_change_nothing(kind: dict[str, Any], seed: int, random: Any) -> None:
    """Right ones, wrong ones, and right ones after a wrong one."""
    alone = text_of(sequence(**kind, seed=seed), 16)

    def guess(token_ids: list[int]) -> tuple[int, ...]:
        place = len(token_ids) - 1
        right = alone[place : place + random.randrange(6)]
        return tuple(t if random.random() < 0.8 else random.randrange(VOCAB) for t in right)

    assert text_of(sequence(**kind, seed=seed), 16, guess=guess) == alone


def test_a_guess_counts_for_min_tokens() -> None:
    own, logits = sequence([1], [5], min_tokens=2, temperature=0.0), rows(2)
    logits[:, 3], logits[:, 7] = 50.0, 40.0  # the end, and what comes where it is barred
    (result,) = sampler_of(0, EOS).sample(logits, plan_of([own], [(7,)]))
    assert result.token_ids == (7, 3)


def test_right_guesses_are_all_taken_at_once() -> None:
    alone = text_of(sequence(seed=1), 6)
    own, drafts = sequence(seed=1), tuple(alone[:5])
    logits = torch.stack([model([1, *drafts[:place]]) for place in range(6)])
    (result,) = sampler_of().sample(logits, plan_of([own], [drafts]))
    assert list(result.token_ids) == alone


def test_continuations_of_one_request_draw_on_their_own() -> None:
    """From the same row, as siblings do; and a seeded one as a request with the next seed would."""
    logits = rows(1, seed=4).repeat(3, 1)
    siblings = [sequence(seq_id=i, index=i, seed=5) for i in range(3)]
    plan = StepPlan(
        chunks=(), draws=tuple(Draw(sequence=own, row=0) for own in siblings), prompt_rows=()
    )
    found = [result.token_ids[0] for result in sampler_of().sample(logits[:1], plan)]
    assert found == tokens_of(logits, [sequence(seq_id=9 - i, seed=5 + i) for i in range(3)])
    texts = [text_of(sequence(index=i, seed=5)) for i in range(3)]
    assert len(set(map(tuple, texts))) == 3


def test_without_a_seed_the_engines_and_the_sequences_own_number_decide() -> None:
    logits = rows(1).repeat(40, 1)
    batch = [sequence(seq_id=i) for i in range(40)]
    assert tokens_of(logits, batch) == tokens_of(logits, batch)
    assert tokens_of(logits, batch, seed=1) != tokens_of(logits, batch)
    assert len(set(tokens_of(logits, batch))) > 3


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 2**70, -(2**70)])
def test_every_whole_number_is_a_seed(seed: int) -> None:
    own = sequence(seed=seed)
    assert tokens_of(rows(1), [own]) == [row_of(own, rows(1)[0]).token()]
    assert tokens_of(rows(1), [sequence(seq_id=2**62)], seed=2**63 - 1)


# -- randomness -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}]
)
def test_draws_follow_the_weights(kind: dict[str, Any]) -> None:
    """Over sequences at one place, and over the places of one seeded sequence."""
    num_draws, logits = 3_000, rows(1, vocab=12, seed=2, spread=1.0)
    kept = row_of(sequence(**kind), logits[0]).kept()
    weights = np.array([kept.get(token, 0.0) for token in range(12)])
    want = num_draws * weights / weights.sum()
    many = logits.expand(num_draws, -1)
    others = tokens_of(many, [sequence(seq_id=i, **kind) for i in range(num_draws)], seed=3)
    assert_follows(np.bincount(others, minlength=12), want)
    one = Sequence(sequence(**kind, seed=11).request, seq_id=0)
    places = [Sequence(one.request, seq_id=i) for i in range(num_draws)]
    for i, own in enumerate(places):
        own.token_ids = [1] * (i + 1)
    assert_follows(np.bincount(tokens_of(many, places), minlength=12), want)


# -- edges ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1e-4, 1e-12, 1e-45, 1e-300])
@pytest.mark.parametrize("kind", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_a_temperature_close_to_zero_is_greedy(temperature: float, kind: dict[str, Any]) -> None:
    logits = rows(6) * 40
    batch = [sequence(seq_id=i, temperature=temperature, **kind) for i in range(6)]
    assert tokens_of(logits, batch) == logits.argmax(-1).tolist()


def test_the_first_of_equals_is_the_greedy_one_also_with_top_k_1() -> None:
    batch = [sequence(temperature=0.0), sequence(top_k=1), sequence(temperature=0.0, min_tokens=9)]
    assert tokens_of(torch.zeros(3, VOCAB), batch) == [0, 0, 1]


def test_of_equal_weights_all_stay_or_none() -> None:
    logits = torch.tensor([2.0, 1, 1, 1, 0]).expand(600, -1)
    for kind, want in (({"top_k": 2}, {0, 1, 2, 3}), ({"top_p": 0.6}, {0, 1, 2, 3})):
        batch = [sequence(seq_id=i, **kind) for i in range(600)]
        assert set(tokens_of(logits, batch)) == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_read_as_they_are(dtype: torch.dtype) -> None:
    logits = rows(4).to(dtype)
    for kind in ({"temperature": 0.0}, {"seed": 3}, {"temperature": 0.0, "presence_penalty": 1.0}):
        batch = [sequence(seq_id=i, **kind) for i in range(4)]
        assert tokens_of(logits, batch) == tokens_of(logits.float(), batch)


def test_rows_without_a_draw_are_not_looked_at() -> None:
    logits = rows(5)
    logits[[0, 2, 4]] = math.nan
    draws = tuple(Draw(sequence=sequence(seq_id=i, seed=i), row=i) for i in (3, 1))
    found = sampler_of().sample(logits, StepPlan(chunks=(), draws=draws, prompt_rows=()))
    alone = tokens_of(logits[[3, 1]], [draw.sequence for draw in draws])
    assert [result.token_ids for result in found] == [(token,) for token in alone]
    assert sampler_of().sample(logits, plan_of([])) == []


def test_rows_past_those_of_the_plan_are_left_out() -> None:
    """As a recorded step of another size has them."""
    batch = [sequence(seq_id=i, seed=i, logprobs=2) for i in range(3)]
    logits = rows(8)
    logits[3:] = math.nan
    found = sampler_of().sample(logits, plan_of(batch))
    assert same(found, sampler_of().sample(logits[:3], plan_of(batch)))
    assert not any(result.error for result in found)


@pytest.mark.parametrize("laid", ["transposed", "every other", "narrowed", "repeated"])
def test_logits_may_lie_in_any_way(laid: str) -> None:
    made = rows(4)
    logits = {
        "transposed": lambda: made.t().contiguous().t(),
        "every other": lambda: torch.stack([made, made * 0], -1)[..., 0],
        "narrowed": lambda: torch.cat([made, made], -1)[:, :VOCAB],
        "repeated": lambda: made[:1].expand(4, -1),
    }[laid]()
    plain = logits.contiguous()
    kinds = [*ALL_KINDS[:4], {"logprobs": 3, "logit_bias": {1: 1.0}, "min_p": 0.1}]
    for kind in kinds:
        batch = [sequence(seq_id=i, **{"seed": i, **kind}) for i in range(4)]
        found = sampler_of().sample(logits, plan_of(batch))
        assert same(found, sampler_of().sample(plain, plan_of(batch)))


@pytest.mark.parametrize("kind", [{"repetition_penalty": 1.2}, {"prompt_logprobs": 1}])
def test_a_token_without_a_logit_is_an_error_not_a_crash(kind: dict[str, Any]) -> None:
    """On a device, an index out of range would be the end of all work there."""
    own = sequence([1, VOCAB, 2], **kind)
    plan = StepPlan.of([Chunk(sequence=own, start=0, stop=3, samples=True)])
    logits = rows(3 if plan.prompt_rows else 1)
    with pytest.raises(IndexError):
        sampler_of().sample(logits, plan)


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ((math.nan,), "NaN"),
        ((math.nan, math.inf), "NaN"),
        ((math.inf,), "+inf"),
        ((-math.inf,) * VOCAB, "all its logits are -inf"),
    ],
)
@kinds
def test_a_broken_row_says_so_and_the_others_go_on(
    kind: dict[str, Any], values: tuple[float, ...], cause: str
) -> None:
    logits = rows(3)
    healthy = [sequence(seq_id=0, seed=1, **kind), sequence(seq_id=2, logprobs=1, **kind)]
    want = sampler_of().sample(logits[[0, 2]], plan_of(healthy))
    logits[1, VOCAB - len(values) :] = torch.tensor(values)
    broken = sequence(seq_id=1, logprobs=2, **kind)
    found = sampler_of().sample(logits, plan_of([healthy[0], broken, healthy[1]]))
    assert same([found[0], found[2]], want)
    assert found[1].token_ids == ()
    assert cause in found[1].error


def test_a_few_tokens_of_no_weight_at_all_are_no_error() -> None:
    logits = rows(1)
    logits[0, 10:] = -math.inf
    for kind in ALL_KINDS:
        for seed in range(20):
            assert tokens_of(logits, [sequence(seed=seed, **kind)])[0] < 10


def test_a_bad_word_that_began_in_the_prompt_is_none() -> None:
    """As in vLLM: only what was generated counts."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 9.0
    words = ((4, 5), (1, 4, 5))
    for output, token in (([], 5), ([4], 0), ([3], 5)):
        own = sequence([1, 4], output, bad_words=words, temperature=0.0)
        assert tokens_of(logits, [own]) == [token]


def test_where_nothing_is_allowed_the_sequence_ends() -> None:
    own = sequence(bad_words=tuple((token,) for token in range(VOCAB)))
    (result,) = sampler_of().sample(rows(1), plan_of([own]))
    assert result.token_ids == ()
    assert "bad_words" in result.error


def test_a_broken_row_after_a_right_guess_waits_for_the_next_step() -> None:
    """As without guesses: what came before it is text, and then the sequence fails."""
    logits = rows(3)
    first = int(logits[0].argmax())
    logits[1] = math.nan
    own = sequence(temperature=0.0)
    (result,) = sampler_of().sample(logits, plan_of([own], [(first, 4)]))
    assert result == Sampled(token_ids=(first,))
    (result,) = sampler_of().sample(logits, plan_of([own], [((first + 1) % VOCAB, 4)]))
    assert result == Sampled(token_ids=(first,))
    own.token_ids.append(first)
    (result,) = sampler_of().sample(logits[1:2], plan_of([own]))
    assert "NaN" in result.error


# -- what it costs --------------------------------------------------------------------------------


def test_a_greedy_batch_costs_one_argmax(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, batch = rows(8), [sequence(seq_id=i, temperature=0.0) for i in range(8)]

    def never(*_: Any) -> None:
        raise AssertionError("more was done")

    sampling = "quire.engine.sampling"
    for name in ("DrawBatch", "edits_to_send", "make_edits", "draw", "describe"):
        monkeypatch.setattr(f"{sampling}.choices.{name}", never)
    assert tokens_of(logits, batch) == logits.argmax(-1).tolist()


def test_a_token_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the text is: a step adds what came since the last one."""
    counted: list[int] = []
    add = "quire.engine.sampling.logits_processors.TokenCounts.add"
    monkeypatch.setattr(add, lambda _, token_id: counted.append(token_id))
    own, sampler = sequence(range(40), presence_penalty=1.0), sampler_of()
    for step in range(30):
        own.token_ids.append(step)
        sampler.sample(rows(1), plan_of([own]))
    assert counted == list(range(30))


# -- a prompt's own log-probabilities -------------------------------------------------------------


@pytest.mark.parametrize("num_top", [-1, 0, 3])
@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_prompt_logprobs_are_those_of_each_token_after_the_first(num_top: int, chunk: int) -> None:
    vocab = 5000  # a few rows at once
    prompt = [int(token) for token in torch.randint(0, vocab, (90,), generator=torch.Generator())]
    own = sequence(prompt, prompt_logprobs=num_top, temperature=0.0)
    logits, sampler = rows(len(prompt), vocab), sampler_of()
    for start in range(0, len(prompt), chunk):
        stop = min(start + chunk, len(prompt))
        plan = StepPlan.of(
            [Chunk(sequence=own, start=start, stop=stop, samples=stop == len(prompt))]
        )
        assert own.lacks_prompt_logprobs == bool(plan.prompt_rows) or stop == len(prompt)
        for _ in range(2):  # done twice, it is the same
            sampler.sample(logits[start:stop] if plan.prompt_rows else logits[-1:], plan)
    assert not own.lacks_prompt_logprobs
    assert len(own.prompt_logprobs) == len(prompt) - 1
    for place in (0, 1, 63, 64, 88):
        want = row_of(own, logits[place]).logprobs(prompt[place + 1], num_top)
        found = own.prompt_logprobs[place]
        assert (found.token_id, found.rank) == (want.token_id, want.rank)
        assert found.logprob == pytest.approx(want.logprob, abs=1e-5)
        assert [t for t, _ in found.top] == [t for t, _ in want.top]


def test_prompt_logprobs_of_a_broken_row_are_no_numbers() -> None:
    own = sequence([1, 2, 3], prompt_logprobs=1)
    logits = rows(2)
    logits[1, 4] = math.nan
    where = PromptRows(sequence=own, row=0, start=0, num_rows=2)
    sampler_of().sample(logits, StepPlan(chunks=(), draws=(), prompt_rows=(where,)))
    assert math.isfinite(own.prompt_logprobs[0].logprob)
    assert math.isnan(own.prompt_logprobs[1].logprob)


def test_zeros_of_both_signs_are_equal() -> None:
    """Of equal tokens the lower id comes first, and their bits do not count."""
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0, -2.0]])
    own = sequence([1, 2], temperature=0.0, logprobs=3)
    (found,) = sampler_of().sample(logits, plan_of([own]))
    ((told,), (token,)) = found.logprobs, found.token_ids
    assert (token, told.rank) == (1, 1)
    assert [token_id for token_id, _ in told.top] == [1, 2, 3]


def test_a_temperature_that_float32_cannot_hold_is_greedy() -> None:
    logits = rows(8)
    batch = [sequence(seq_id=i, temperature=1e-300) for i in range(8)]
    assert tokens_of(logits, batch) == logits.argmax(-1).tolist()
