"""The figures of a benchmark, against numbers worked out by hand, and the table made of them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.load import Outcome
from quire.bench.metrics import (
    details,
    figures,
    parse_goodput,
    parse_percentiles,
    peak_concurrency,
    peak_tokens_per_s,
    table,
    tpot_s,
)
from quire.errors import ConfigError

# Three requests of which two succeed, in 4 seconds:
#   a  sent at 10.0; tokens at 10.5, 11.0, 12.0; 5 in, 3 out
#   b  sent at 11.5; one token at 12.5; 7 in, 1 out; it waited 1.5 s for a place
#   c  sent at 12.0 and failed
RUN = (
    Outcome(
        prompt_tokens=5,
        start_s=10.0,
        ttft_s=0.5,
        itls_s=[0.5, 1.0],
        latency_s=2.0,
        output_tokens=3,
        text="abc",
    ),
    Outcome(prompt_tokens=7, start_s=11.5, queue_s=1.5, ttft_s=1.0, latency_s=1.0, output_tokens=1),
    Outcome(prompt_tokens=9, start_s=12.0, ttft_s=9.0, latency_s=9.0, error="ValueError: no"),
)


def test_figures_worked_by_hand() -> None:
    found = figures(RUN, 4.0, percentiles=(50, 99))
    assert found == {
        "duration": 4.0,
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 12,
        "total_output_tokens": 4,
        "request_throughput": 0.5,
        "request_goodput": None,
        "output_throughput": 1.0,
        "total_token_throughput": 4.0,
        # a's at 0.5; then 1.0; then a's and b's at 2.0 and 2.5
        "max_output_tokens_per_s": 2.0,
        "max_concurrent_requests": 2,  # from 11.5 to 12.0
        "mean_ttft_ms": 750.0,
        "median_ttft_ms": 750.0,
        "std_ttft_ms": 250.0,
        "p50_ttft_ms": 750.0,
        "p99_ttft_ms": pytest.approx(995.0),
        # (2.0 − 0.5) / (3 − 1); b has no second token
        "mean_tpot_ms": 750.0,
        "median_tpot_ms": 750.0,
        "std_tpot_ms": 0.0,
        "p50_tpot_ms": 750.0,
        "p99_tpot_ms": 750.0,
        "mean_itl_ms": 750.0,
        "median_itl_ms": 750.0,
        "std_itl_ms": 250.0,
        "p50_itl_ms": 750.0,
        "p99_itl_ms": pytest.approx(995.0),
        "mean_e2el_ms": 1500.0,
        "median_e2el_ms": 1500.0,
        "std_e2el_ms": 500.0,
        "p50_e2el_ms": 1500.0,
        "p99_e2el_ms": pytest.approx(1990.0),
        "mean_client_queue_time_ms": 750.0,
        "median_client_queue_time_ms": 750.0,
        "std_client_queue_time_ms": 750.0,
        "p50_client_queue_time_ms": 750.0,
        "p99_client_queue_time_ms": pytest.approx(1485.0),
    }


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({"ttft": 499}, 0),
        ({"ttft": 500}, 1),
        ({"ttft": 1000}, 2),
        ({"ttft": 1000, "tpot": 749}, 1),  # b has none, which is 0
        ({"tpot": 750, "e2el": 1999}, 1),
        ({"ttft": 500, "tpot": 750, "e2el": 2000}, 1),
    ],
)
def test_goodput_counts_who_meets_all_goals(goals: dict[str, float], good: int) -> None:
    assert figures(RUN, 4.0, goodput=goals)["request_goodput"] == good / 4


def test_of_nothing_every_figure_is_zero() -> None:
    found = figures(RUN[2:], 1.0, goodput={"ttft": 1})
    assert (found.pop("duration"), found.pop("failed")) == (1.0, 1)
    assert set(found.values()) == {0}


def test_details_are_in_order_and_a_failed_one_has_no_output() -> None:
    found = details(RUN)
    assert found["input_lens"] == [5, 7, 9]
    assert found["output_lens"] == [3, 1, 0]
    assert found["itls"] == [[0.5, 1.0], [], []]
    assert found["errors"] == ["", "", "ValueError: no"]
    assert found["generated_texts"] == ["abc", "", ""]
    assert found["queue_times"] == [0, 1.5, 0]
    assert set(map(len, found.values())) == {3}


def outcomes() -> st.SearchStrategy[list[Outcome]]:
    quarter = st.integers(0, 40).map(lambda n: n / 4)
    one = st.builds(
        lambda start, ttft, itls: Outcome(
            prompt_tokens=1,
            start_s=100 + start,
            ttft_s=ttft,
            itls_s=itls,
            latency_s=ttft + sum(itls),
            output_tokens=1 + len(itls),
        ),
        quarter,
        quarter,
        st.lists(quarter, max_size=5),
    )
    return st.lists(one, min_size=1, max_size=8)


@given(outcomes())
def test_the_peaks_are_those_of_a_slow_count(several: list[Outcome]) -> None:
    begin = min(outcome.start_s for outcome in several)
    moments = [
        outcome.start_s + outcome.ttft_s + sum(outcome.itls_s[:count])
        for outcome in several
        for count in range(len(outcome.itls_s) + 1)
    ]
    in_second = [math.floor(moment - begin) for moment in moments]
    assert peak_tokens_per_s(several) == max(map(in_second.count, in_second))
    under_way = [
        sum(o.start_s <= at < o.start_s + o.latency_s for o in several)
        for at in [outcome.start_s for outcome in several]
    ]
    assert peak_concurrency(several) == max(under_way)
    for outcome in several:
        itls_s = outcome.itls_s
        assert tpot_s(outcome) == pytest.approx(sum(itls_s) / len(itls_s) if itls_s else 0)


def test_the_table_has_vllms_lines() -> None:
    result = {
        "max_concurrency": 8,
        "request_rate": 2.0,
        **figures(RUN, 4.0, percentiles=(50, 99.9), goodput={"ttft": 500}),
    }
    lines = table(result, (50, 99.9)).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "---------------Inter-token Latency----------------" in lines
    for label, value in {
        "Successful requests:": "2",
        "Failed requests:": "1",
        "Maximum request concurrency:": "8",
        "Request rate configured (RPS):": "2.00",
        "Benchmark duration (s):": "4.00",
        "Total input tokens:": "12",
        "Total generated tokens:": "4",
        "Request throughput (req/s):": "0.50",
        "Request goodput (req/s):": "0.25",
        "Output token throughput (tok/s):": "1.00",
        "Peak output token throughput (tok/s):": "2.00",
        "Peak concurrent requests:": "2.00",
        "Total token throughput (tok/s):": "4.00",
        "Mean TTFT (ms):": "750.00",
        "P50 TPOT (ms):": "750.00",
        "P99.9 E2EL (ms):": "1999.00",
        "Median Client Queue Time (ms):": "750.00",
    }.items():
        assert f"{label:<40} {value}" in lines
    unbounded = {**result, "max_concurrency": None, "request_rate": "inf", "request_goodput": None}
    text = table(unbounded, (50, 99.9))
    for missing in ("Maximum", "configured", "goodput", "Queue", "KV Cache"):
        assert missing not in text


@pytest.mark.parametrize(
    ("given", "goals"),
    [
        ([], {}),
        (["ttft:500"], {"ttft": 500}),
        (["ttft:500", "tpot:0"], {"ttft": 500, "tpot": 0}),
        (["ttft:500 tpot:2.5,e2el:9e3"], {"ttft": 500, "tpot": 2.5, "e2el": 9000}),
    ],
)
def test_goals_are_read_as_vllms_flag_has_them(given: list[str], goals: dict[str, float]) -> None:
    assert parse_goodput(given) == goals


@pytest.mark.parametrize("given", ["ttft", "ttft:", "ttft:x", "itl:5", "ttft:-1", "ttft:nan", ":5"])
def test_goals_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"--goodput .* must be one of ttft, tpot, e2el"):
        parse_goodput([given])


def test_percentiles() -> None:
    assert parse_percentiles("25,50,99.9") == (25, 50, 99.9)
    for wrong in ("", "x", "101", "50,-1", "nan"):
        with pytest.raises(ConfigError, match="--metric-percentiles"):
            parse_percentiles(wrong)
