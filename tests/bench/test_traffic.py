"""What a benchmark sends: lengths, times and shared beginnings, drawn or from a trace."""

import json
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.traffic import BenchTraffic, replay
from quire.bench.workload import RandomLengths, Vocabulary, arrivals
from quire.errors import ConfigError
from quire.traces import TraceRequest

WORDS = Vocabulary(range(10, 20))


def traffic(**options: Any) -> BenchTraffic:
    return BenchTraffic(**{"num_prompts": 8, "seed": 0, "lengths": RandomLengths(), **options})


@given(
    length=st.integers(1, 50),
    ratio=st.floats(0, 0.99),
    prefix=st.integers(0, 9),
    seed=st.integers(0, 2**40),
)
def test_lengths_are_within_their_range(length: int, ratio: float, prefix: int, seed: int) -> None:
    lengths = RandomLengths(
        input_len=length, output_len=2 * length, range_ratio=ratio, prefix_len=prefix
    )
    queries = traffic(lengths=lengths, seed=seed).queries(WORDS)
    assert len(queries) == 8
    for query in queries:
        num_own = len(query.token_ids) - prefix
        assert max(1, length * (1 - ratio) - 1) <= num_own <= length * (1 + ratio) + 1
        assert max(1, 2 * length * (1 - ratio) - 1) <= query.max_tokens
        assert query.max_tokens <= 2 * length * (1 + ratio) + 1
        assert query.token_ids[:prefix] == queries[0].token_ids[:prefix]
        assert set(query.token_ids) <= set(range(10, 20))
        assert query.at_s == 0
    assert traffic(lengths=lengths, seed=seed).queries(WORDS) == queries


def test_another_seed_asks_something_else() -> None:
    assert traffic(seed=1).queries(WORDS) != traffic(seed=2).queries(WORDS)
    assert traffic(seed=1).warmups(2, WORDS)[0].token_ids not in [
        query.token_ids for query in traffic(seed=1).queries(WORDS)
    ]


@given(
    num_prompts=st.integers(1, 200),
    rate=st.floats(0.01, 1e4),
    burstiness=st.sampled_from([0.3, 1.0, 5.0, inf]),
)
def test_requests_come_in_order_at_the_rate_asked_for(
    num_prompts: int, rate: float, burstiness: float
) -> None:
    times = arrivals(num_prompts, rate, burstiness, np.random.default_rng(0))
    assert len(times) == num_prompts
    assert all(a <= b for a, b in pairwise([0.0, *times]))
    assert times[-1] == pytest.approx(num_prompts / rate)


def test_burstiness_is_how_uneven_the_gaps_are() -> None:
    def unevenness(burstiness: float) -> float:
        gaps = np.diff(arrivals(20_000, 1.0, burstiness, np.random.default_rng(7)))
        return float(gaps.std() / gaps.mean())

    # Of a gamma distribution it is 1 / sqrt(shape); 1 is a Poisson process.
    for burstiness in (0.25, 1.0, 4.0):
        assert unevenness(burstiness) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert unevenness(inf) == pytest.approx(0, abs=1e-9)
    assert set(arrivals(5, inf, 1.0, np.random.default_rng(0))) == {0.0}


# -- traces ---------------------------------------------------------------------------------------

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,0
"""
MOONCAKE = [
    {"timestamp": 3000, "input_length": 1200, "output_length": 50, "hash_ids": [0, 1, 2]},
    {"timestamp": 3500, "input_length": 1300, "output_length": 4, "hash_ids": [0, 1, 3]},
    {"timestamp": 6000, "input_length": 700, "output_length": 8, "hash_ids": [4, 5]},
]


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    path = tmp_path / "mooncake.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MOONCAKE))
    return path


def test_azures_trace_has_lengths_and_times(azure: Path) -> None:
    queries = traffic(trace=azure, num_prompts=10).queries(WORDS)
    assert [len(query.token_ids) for query in queries] == [374, 396, 879]
    assert [query.max_tokens for query in queries] == [44, 109, 1]
    assert [query.at_s for query in queries] == pytest.approx([0, 4.314579, 4.541877], abs=1e-6)
    assert len(traffic(trace=azure, num_prompts=2).queries(WORDS)) == 2


def test_scaled_and_replayed_faster(azure: Path) -> None:
    queries = traffic(trace=azure, trace_scale=0.1, trace_speed=2).queries(WORDS)
    assert [len(query.token_ids) for query in queries] == [37, 40, 88]
    assert [query.max_tokens for query in queries] == [4, 11, 1]
    assert queries[1].at_s == pytest.approx(4.314579 / 2, abs=1e-6)


def test_a_rate_of_ones_own_replaces_a_traces_times(azure: Path) -> None:
    at_once = traffic(trace=azure, request_rate=inf)
    assert {query.at_s for query in at_once.queries(WORDS)} == {0.0}
    assert (at_once.rate, traffic(trace=azure).rate) == ("inf", "trace")
    assert traffic(trace=azure, request_rate=2.0).queries(WORDS)[-1].at_s == pytest.approx(1.5)
    assert (traffic().rate, traffic(request_rate=2.0).rate) == ("inf", 2.0)


@pytest.mark.parametrize("scale", [1.0, 0.1, 0.013])
def test_mooncakes_prompts_begin_alike_as_far_as_their_ids_do(mooncake: Path, scale: float) -> None:
    queries = traffic(trace=mooncake, trace_scale=scale, lengths=RandomLengths()).queries(
        Vocabulary(range(10**6))
    )
    first, second, third = (query.token_ids for query in queries)
    shared = 2 * round(512 * scale)
    assert first[:shared] == second[:shared]
    assert first[shared] != second[shared]
    assert first[0] != third[0]
    assert [len(ids) for ids in (first, second, third)] == [
        round(n * scale) for n in (1200, 1300, 700)
    ]
    assert [query.at_s for query in queries] == [0.0, 0.5, 3.0]


@given(
    num_tokens=st.integers(0, 3000),
    num_ids=st.integers(0, 7),
    scale=st.floats(1e-3, 2),
)
def test_a_prompt_has_its_length_whatever_its_ids_say(
    num_tokens: int, num_ids: int, scale: float
) -> None:
    request = TraceRequest(
        at_s=0,
        input_tokens=num_tokens,
        output_tokens=1,
        hash_ids=tuple(range(num_ids)),
        id_tokens=512,
    )
    (query,) = replay([request], WORDS, seed=0, scale=scale)
    assert len(query.token_ids) == max(1, round(num_tokens * scale))


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_prompts": 0}, "--num-prompts 0 must be at least 1"),
        ({"request_rate": 0.0}, "--request-rate 0.0 must be above 0"),
        ({"request_rate": float("nan")}, "--request-rate nan must be above 0"),
        ({"request_rate": 1.0, "burstiness": 0.0}, "--burstiness 0.0 must be above 0"),
        ({"trace": Path("missing.csv")}, "missing.csv cannot be read: No such file"),
        ({"trace": "http://127.0.0.1:9/x.csv"}, "x.csv cannot be read: .*refused"),
        ({"trace_max_skipped": -1}, "--trace-max-skipped -1 must be at least 0"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        traffic(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_len": 0}, "--random-input-len 0 must be at least 1"),
        ({"output_len": 0}, "--random-output-len 0"),
        ({"prefix_len": -1}, "--random-prefix-len -1 must be at least 0"),
        ({"range_ratio": 1.0}, "--random-range-ratio 1.0"),
        ({"range_ratio": -0.1}, "--random-range-ratio -0.1"),
    ],
)
def test_lengths_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RandomLengths(**options)


@pytest.mark.parametrize("name", ["trace_scale", "trace_speed"])
@pytest.mark.parametrize("value", [0.0, -1.0, inf, float("nan")])
def test_a_trace_is_scaled_by_a_number(name: str, value: float, azure: Path) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .* a number above 0"):
        traffic(trace=azure, **{name: value})
