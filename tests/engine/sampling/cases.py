"""Sequences, plans and logits for tests of the sampler, and the sampler in each of its ways.

``host`` is the host's logits; ``cuda`` is the same on a GPU, where there is one.
"""

import math
from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from engine.sampling.slow import Row
from quire.engine.sampling import LogitsSampler
from quire.engine.sequence import Request, Sequence
from quire.engine.step_plan import Draw, Sampled, StepPlan
from quire.sampling_params import SamplingParams

HAS_GPU = torch.cuda.is_available()
WAYS = ["host", *([pytest.param("cuda", marks=pytest.mark.gpu)] if HAS_GPU else [])]
EOS = frozenset([0, 3])
VOCAB = 50


def sequence(
    prompt: Several[int] = (1,),
    output: Several[int] = (),
    *,
    seq_id: int = 1,
    index: int = 0,
    bad_words: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> Sequence:
    request = Request(
        request_id=seq_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=1000, **params),
        bad_words=bad_words,
    )
    made = Sequence(request, seq_id=seq_id, index=index)
    made.token_ids += output
    return made


def row_of(own: Sequence, logits: Tensor, drafts: Several[int] = ()) -> Row:
    return Row(
        logits=logits.double().tolist(),
        params=own.request.params,
        prompt=list(own.request.prompt_token_ids),
        output=[*own.output_token_ids, *drafts],
        bad_words=own.request.bad_words,
        eos=EOS,
        index=own.index,
    )


def plan_of(sequences: Several[Sequence], drafts: Several[tuple[int, ...]] = ()) -> StepPlan:
    """A draw for each sequence, its rows one after the other."""
    draws, row = [], 0
    for own, guesses in zip(sequences, drafts or [()] * len(sequences), strict=True):
        draws.append(Draw(sequence=own, row=row, drafts=guesses))
        row += 1 + len(guesses)
    return StepPlan(chunks=(), draws=tuple(draws), prompt_rows=())


def rows(num_rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * spread


@st.composite
def any_params(draw: st.DrawFn, vocab: int) -> dict[str, Any]:
    """Any of the parameters, each left alone half of the time."""
    token = st.integers(0, vocab - 1)
    choices = {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.integers(-1, vocab + 2),
        "top_p": st.floats(0.05, 0.99),
        "min_p": st.floats(0.01, 1.0),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "logit_bias": st.dictionaries(token, st.floats(-20, 20), max_size=4),
        "allowed_token_ids": st.lists(token, min_size=1, max_size=20),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(st.integers(0, vocab + 5), max_size=2),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([-1, 0, 1, 3, 1000]),
    }
    params = {name: draw(some) for name, some in choices.items() if draw(st.booleans())}
    return {**params, "seed": draw(st.integers(-5, 2**64))}


@st.composite
def any_batch(draw: st.DrawFn) -> tuple[list[Sequence], list[tuple[int, ...]], Tensor]:
    """Sequences of all kinds, guesses at what they go on with, and logits on a coarse grid."""
    vocab = draw(st.sampled_from([4, 7, 40, 127, 128, 129, 300]))
    tokens = st.lists(st.integers(0, vocab - 1), max_size=6)
    batch, drafts = [], []
    for seq_id in range(draw(st.integers(1, 5))):
        words = draw(st.lists(tokens.filter(bool), max_size=3))
        own = sequence(
            draw(tokens.filter(bool)),
            draw(tokens),
            seq_id=seq_id,
            index=draw(st.integers(0, 2)),
            bad_words=tuple(map(tuple, words)),
            **draw(any_params(vocab)),
        )
        batch.append(own)
        drafts.append(tuple(draw(tokens)[:3]))
    num_rows = len(batch) + sum(map(len, drafts))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    return batch, drafts, torch.from_numpy(numbers.integers(-16, 17, (num_rows, vocab)) / 4).float()


def assert_follows(counts: Any, expected: Any) -> None:
    """Pearson's statistic lies within five standard deviations of its mean. Seeds are fixed."""
    counts, expected = np.asarray(counts, float).ravel(), np.asarray(expected, float).ravel()
    assert not counts[expected == 0].any(), "what has no weight has come"
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert (expected >= 5).all(), "too few draws to say anything"
    freedom = len(counts) - 1
    assert ((counts - expected) ** 2 / expected).sum() < freedom + 5 * math.sqrt(2 * freedom)


class Moved:
    """A sampler whose logits come from a GPU."""

    def __init__(self, own: LogitsSampler) -> None:
        self._own = own

    def sample(self, logits: Tensor, plan: StepPlan) -> list[Sampled]:
        return self._own.sample(logits.cuda(), plan)

    def forget(self, sequence: Sequence) -> None:
        self._own.forget(sequence)


class Ways:
    """Makes samplers of the way that a test module is in."""

    def __init__(self) -> None:
        self.way = "host"

    def __call__(self, seed: int = 0, eos: frozenset[int] = frozenset()) -> LogitsSampler | Moved:
        if self.way == "cuda":
            return Moved(LogitsSampler(seed, eos))
        return LogitsSampler(seed, eos)

    @contextmanager
    def taken(self, way: str) -> Iterator[None]:
        self.way = way
        yield
        self.way = "host"


sampler_of = Ways()
