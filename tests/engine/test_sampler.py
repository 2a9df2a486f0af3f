"""Which tokens the filters leave, against plain references; and whose randomness is whose."""

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire.engine.sampler import Sampler, filtered
from quire.engine.sequence import Request, SamplingParams, Sequence
from quire.errors import RequestError

VOCAB = 50


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def sequence(seq_id: int = 1, **params: object) -> Sequence:
    return Sequence(
        Request(request_id=seq_id, prompt_token_ids=(1,), params=SamplingParams(**params))
    )


def rows(num_rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab, generator=generator) * spread


def kept_by_reference(logits: list[float], params: SamplingParams) -> set[int]:
    """The filters one after the other; of equal tokens the lower id comes first."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if params.top_k:
        order = order[: params.top_k]
    top = logits[order[0]]
    weights = [math.exp((logits[token] - top) / params.temperature) for token in order]
    total = math.fsum(weights)
    kept, before = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        if params.top_p < 1 and before / total >= params.top_p:
            break
        if weight >= params.min_p:
            kept.add(token)
        before += weight
    return kept


def kept(logits: Tensor, params: list[SamplingParams]) -> list[set[int]]:
    return [set(row.isfinite().nonzero()[:, 0].tolist()) for row in filtered(logits, params)]


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(top_k=1),
    SamplingParams(top_k=7),
    SamplingParams(top_k=VOCAB),
    SamplingParams(top_k=10 * VOCAB),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=0.5, temperature=3.0),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(min_p=0.05, temperature=0.5),
    SamplingParams(top_k=9, top_p=0.8, min_p=0.02, temperature=1.7),
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: repr(p)[14:90])
def test_the_filters_keep_exactly_the_reference_set(params: SamplingParams) -> None:
    logits = rows(40)
    want = [kept_by_reference(row, params) for row in logits.double().tolist()]
    assert kept(logits, [params] * 40) == want


def test_rows_of_all_kinds_are_filtered_each_by_its_own() -> None:
    logits = rows(len(PARAMS))
    alone = torch.cat([filtered(logits[i : i + 1], [p]) for i, p in enumerate(PARAMS)])
    assert torch.equal(filtered(logits, PARAMS), alone)


@given(
    logits=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    top_k=st.integers(0, 15),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
)
@settings(deadline=None)
def test_ties_go_to_the_lower_id(logits: list[int], top_k: int, min_p: float) -> None:
    params = SamplingParams(top_k=top_k, min_p=min_p)
    want = kept_by_reference([float(x) for x in logits], params)
    assert kept(torch.tensor([logits]).float(), [params]) == [want]


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: repr(p)[14:90])
def test_what_is_left_keeps_its_proportions(params: SamplingParams) -> None:
    logits = rows(8)
    left = filtered(logits, [params] * 8)
    want = torch.where(left.isfinite(), logits / params.temperature, -torch.inf).softmax(-1)
    torch.testing.assert_close(left.softmax(-1), want, rtol=1e-5, atol=1e-7)


def test_a_filter_of_one_row_leaves_the_tail_of_the_others() -> None:
    """One likely token and a tail below float32's resolution: nobody asked to cut it."""
    logits = torch.zeros(2, VOCAB)
    logits[:, 0] = 30.0
    together = filtered(logits, [SamplingParams(), SamplingParams(top_k=3)])
    assert torch.equal(together[0], filtered(logits[:1], [SamplingParams()])[0])


@pytest.mark.parametrize("temperature", [1e-4, 1e-12, 1e-45, 1e-300])
def test_a_temperature_close_to_zero_is_greedy(temperature: float) -> None:
    logits = rows(6) * 40
    for more in ({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}):
        sequences = [sequence(i, temperature=temperature, **more) for i in range(6)]
        assert Sampler().sample(logits, sequences) == logits.argmax(-1).tolist()


def test_temperature_zero_is_argmax_in_any_company() -> None:
    logits = rows(6)
    sequences = [sequence(i, temperature=0.0 if i % 2 else 1.0) for i in range(6)]
    tokens = Sampler().sample(logits, sequences)
    assert tokens[1::2] == logits[1::2].argmax(-1).tolist()


def test_the_highest_of_equals_is_the_lower_id() -> None:
    logits = torch.zeros(1, VOCAB)
    assert Sampler().sample(logits, [sequence(temperature=0.0)]) == [0]


def test_no_rows_no_tokens() -> None:
    assert Sampler().sample(torch.empty(0, VOCAB), []) == []


def test_draws_follow_the_weights() -> None:
    """Each frequency lies within six standard deviations; what is filtered never comes."""
    num_draws, weights = 20_000, torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    many = weights.log().expand(num_draws, -1)
    tokens = Sampler(seed=3).sample(many, [sequence(i) for i in range(num_draws)])
    counts = torch.bincount(torch.tensor(tokens), minlength=5)
    deviation = (num_draws * weights * (1 - weights)).sqrt()
    assert ((counts - num_draws * weights).abs() <= 6 * deviation).all()


def continuation(params: dict[str, object], company: int, steps: int = 12) -> list[int]:
    """What a sequence draws from the same logits, with others in the batch."""
    sampler = Sampler(seed=0)
    watched = sequence(99, **params)
    others = [sequence(i, top_k=i, temperature=1.0 + i) for i in range(company)]
    drawn = []
    for step in range(steps):
        logits = rows(company + 1, seed=step)
        logits[company // 2] = rows(1, seed=1000 + step)[0]
        batch = [*others[: company // 2], watched, *others[company // 2 :]]
        drawn.append(sampler.sample(logits, batch)[company // 2])
    return drawn


@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.8}, {"temperature": 0.4}])
def test_a_seed_gives_the_same_tokens_in_any_company(params: dict[str, object]) -> None:
    alone = continuation({**params, "seed": 7}, 0)
    assert alone == continuation({**params, "seed": 7}, 5)
    assert alone != continuation({**params, "seed": 8}, 0)


def test_a_sequence_without_a_seed_depends_on_the_engines_seed_and_itself_only() -> None:
    logits = rows(1)[0].expand(2, -1)

    def draw(engine_seed: int) -> list[list[int]]:
        sampler, two = Sampler(engine_seed), [sequence(1), sequence(2)]
        return [sampler.sample(logits, two) for _ in range(10)]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    assert any(a != b for a, b in draw(0))


def test_a_forgotten_sequence_begins_anew() -> None:
    sampler, logits, one = Sampler(), rows(1), sequence(seed=5)
    first = [sampler.sample(logits, [one])[0] for _ in range(5)]
    sampler.forget(one)
    assert [sampler.sample(logits, [one])[0] for _ in range(5)] == first


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1, 2**70, -(2**70)])
def test_every_whole_number_is_a_seed(seed: int) -> None:
    assert len(Sampler().sample(rows(1), [sequence(seed=seed)])) == 1
    assert len(Sampler(2**63).sample(rows(1), [sequence(2**62)])) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", None),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", None),
        ("seed", "x"),
        ("seed", 1.5),
        ("stop", ("",)),
        ("stop", ""),
        ("stop", ("a", 3)),
        ("stop", None),
        ("stop", 7),
    ],
)
def test_a_parameter_out_of_its_limits_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=rf"^{name}=.* must be "):
        SamplingParams(**{name: value})


def test_stop_is_kept_as_a_tuple() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop == ("ab", "c")
