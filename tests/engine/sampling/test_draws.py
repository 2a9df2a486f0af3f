"""Random numbers, what is drawn with them, and single changes to logits."""

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from engine.sampling.cases import VOCAB, assert_follows, rows, sequence
from engine.sampling.slow import number_of
from quire.engine.sampling.draws import Filters, cut, floors_by_sorting, floors_of_largest
from quire.engine.sampling.logits_processors import (
    Edits,
    TokenCounts,
    edits_to_send,
    make_edits,
)
from quire.engine.sampling.rng import (
    drawn,
    key_of_seed,
    key_of_sequence,
    keys_at,
    padded,
    uniforms,
)


@pytest.mark.parametrize("which", ["places of one sequence", "seeds", "sequences", "engine seeds"])
def test_numbers_are_even_and_neighbours_are_independent(which: str) -> None:
    num, places = 40_000, [0] * 40_000
    match which:
        case "places of one sequence":
            keys, places = [key_of_seed(0)] * num, [*range(num)]
        case "seeds":
            keys = [key_of_seed(seed) for seed in range(num)]
        case "sequences":
            keys = [key_of_sequence(0, seq_id) for seq_id in range(num)]
        case _:
            keys = [key_of_sequence(seed, 0) for seed in range(num)]
    several = uniforms(torch.from_numpy(keys_at(keys, places)), 0, 3).numpy()
    assert ((several > 0) & (several < 1)).all()
    numbers = several[:, 0]
    _, second, third = (several * 20).astype(int).T
    assert_follows(np.bincount(20 * second + third), np.full(400, num / 400))
    assert_follows(np.bincount((numbers * 100).astype(int)), np.full(100, num / 100))
    pairs = (numbers * 20).astype(int)
    assert_follows(np.bincount(20 * pairs[:-1] + pairs[1:]), np.full(400, (num - 1) / 400))


@given(seed=st.integers(-(2**70), 2**70), place=st.integers(0, 2**40))
def test_numbers_are_the_twins(seed: int, place: int) -> None:
    key = torch.from_numpy(keys_at([key_of_seed(seed)], [place]))
    assert uniforms(key, 5, 2).tolist() == [[number_of(seed, place, 5), number_of(seed, place, 6)]]


@given(
    weights=st.lists(st.sampled_from([0.0, 1e-30, 0.1, 0.25, 1.0]), min_size=1, max_size=400),
    top_p=st.one_of(st.floats(0, 1, exclude_min=True), st.sampled_from([2.0**-53, 1 - 2.0**-53])),
    key=st.integers(-(2**63), 2**63 - 1),
)
@example(weights=[0.0] * 130 + [1e-30] + [0.0] * 200, top_p=1 - 2.0**-53, key=0)
def test_a_token_without_weight_never_comes(weights: list[float], top_p: float, key: int) -> None:
    assume(any(weights))
    room = padded(torch.tensor([weights]))
    assert room[0, drawn(room, torch.tensor([key]))[0]] > 0
    filters = Filters(
        torch.tensor([len(weights)]), torch.tensor([1 - top_p]).double(), torch.zeros(1)
    )
    for floors in (
        floors_by_sorting(room, filters),
        floors_of_largest(room, filters, len(weights)),
    ):
        assert floors[0] > 0
        sums = np.cumsum(np.sort(room[0].double().numpy()))
        share = (1 - top_p) * sums[-1]
        below = room[0][room[0] < floors[0]].double().sum().item()
        assert below <= share * (1 + 1e-6)
        assert room[0][room[0] <= floors[0]].double().sum().item() >= share * (1 - 1e-6)


def test_weights_that_move_a_little_seldom_change_a_draw() -> None:
    """As rounding moves them where the same text is computed in other chunks."""
    num, vocab = 2000, 1000
    rng = np.random.default_rng(1)
    logits = 2 * rng.standard_normal((num, vocab))
    moved = logits + 0.01 * rng.standard_normal((num, vocab))
    keys = torch.from_numpy(keys_at([*range(num)], [0] * num))
    pair = []
    for each in (logits, moved):
        room = torch.from_numpy(np.exp(each - each.max(-1, keepdims=True))).float()
        pair.append(drawn(padded(room), keys).numpy())
    shares = [np.exp(each) / np.exp(each).sum(-1, keepdims=True) for each in (logits, moved)]
    moved_share = 0.5 * np.abs(shares[0] - shares[1]).sum(-1).mean()
    assert (pair[0] != pair[1]).mean() < 4 * moved_share


def test_filters_by_hand() -> None:
    """Weights of 8, 4, 2, 1 and 1 of 16, and what is kept of them."""
    kept = {
        (1, 1.0, 0.0): 1,
        (2, 1.0, 0.0): 2,
        (4, 1.0, 0.0): 5,  # of equals all or none
        (0, 0.49, 0.0): 1,
        (0, 0.51, 0.0): 2,
        (0, 0.76, 0.0): 3,
        (0, 1.0, 0.25): 3,
        (0, 1.0, 0.26): 2,
        (3, 0.6, 0.25): 2,  # 8 of 14 are not enough
    }
    for (top_k, top_p, min_p), count in kept.items():
        filters = Filters(
            torch.tensor([top_k or 5]), torch.tensor([1 - top_p]).double(), torch.tensor([min_p])
        )
        weights = padded(torch.tensor([[8, 4, 2, 1, 1]]) / 8)
        for floors in (floors_by_sorting(weights, filters), floors_of_largest(weights, filters, 5)):
            kept_of_them = weights.clone()
            cut(kept_of_them, floors)
            assert kept_of_them.count_nonzero() == count, (top_k, top_p, min_p)


def test_the_repetition_penalty_is_transformers() -> None:
    own, logits = sequence([1, 4, 4], [7], repetition_penalty=1.7), rows(1, spread=0.7)
    tally, edits, found = TokenCounts(own, with_prompt=True), Edits(VOCAB), logits.clone()
    tally.add(7)
    edits.penalise(0, tally, own.request.params)
    sent = edits_to_send(edits)
    make_edits(found, {name: torch.from_numpy(array) for name, array in sent.items()})
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([own.token_ids]), logits)
    assert 0 < logits[0, [1, 4, 7]].max() < 1
    assert logits[0, [1, 4, 7]].min() < 0
    torch.testing.assert_close(found, want)
