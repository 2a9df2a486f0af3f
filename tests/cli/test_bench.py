"""``quire bench``: here and against a server; vLLM's figures, and what the cache took."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from bench.sse_server import serving
from cli.test_commands import quire
from quire.traces import open_trace

SMALL = ("--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "5")
VLLM_KEYS = {
    *("date", "backend", "endpoint_type", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed"),
    *("total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput"),
    *("output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    "max_concurrent_requests",
    *(
        f"{statistic}_{name}_ms"
        for statistic in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el", "client_queue_time")
    ),
}
DETAILS = {
    *("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times"),
    *("generated_texts", "errors"),
}


def bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str
) -> dict[str, Any]:
    assert quire(monkeypatch, "bench", "--json", *flags) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_here_it_prints_vllms_table_and_what_the_cache_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quire(monkeypatch, "bench", *SMALL, "--goodput", "e2el:1e9", "--cache", "virtual") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "============ Serving Benchmark Result ============"
    for line in ("Successful requests:", "Failed requests:", "Total input tokens:"):
        assert any(row.startswith(line) for row in out)
    assert f"{'Total generated tokens:':<40} 30" in out
    assert "----------------KV Cache (virtual)----------------" in out
    assert out[-1] == "=" * 50


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["contiguous", "growing", "paged", "virtual"])
def test_as_json_it_has_vllms_keys_and_adds_up(
    strategy: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(monkeypatch, capsys, *SMALL, "--cache", strategy, "--max-concurrency", "2")
    kv = found.pop("kv")
    assert set(found) == VLLM_KEYS
    assert (found["completed"], found["failed"]) == (6, 0)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (120, 30)
    assert (found["backend"], found["model_id"], found["request_rate"]) == ("quire", "demo", "inf")
    assert found["max_concurrent_requests"] <= 2
    assert found["output_throughput"] == pytest.approx(30 / found["duration"])
    assert kv["strategy"] == strategy
    parts = kv["used_bytes"] + kv["cached_bytes"] + kv["wasted_bytes"]
    assert kv["peak_committed_bytes"] == parts > kv["used_bytes"] > 0
    assert 0 < kv["mean_utilization"] <= 1
    assert (kv["num_preemptions"], kv["num_recomputed_tokens"]) == (0, 0)


def test_a_prefix_that_all_share_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--random-prefix-len", "32", "--max-concurrency", "1")
    kv = bench(monkeypatch, capsys, *SMALL, *flags)["kv"]
    assert kv["num_cached_tokens"] >= 5 * 32  # of all but the first
    assert kv["prefix_hit_rate"] == pytest.approx(kv["num_cached_tokens"] / (6 * 52))
    without = bench(monkeypatch, capsys, *SMALL, *flags, "--no-enable-prefix-caching")["kv"]
    assert (without["num_cached_tokens"], without["cached_bytes"]) == (0, 0)


def test_a_trace_is_replayed_and_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, result = tmp_path / "trace.csv", tmp_path / "result.json"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.0000000,370,40\n"
        "2023-11-16 18:15:47.0000000,390,90\n"
        "2023-11-16 18:15:48.0000000,99999,90\n"
    )
    flags = ("--trace", str(trace), "--trace-scale", "0.1", "--trace-speed", "4")
    found = bench(monkeypatch, capsys, *flags, "--save-result", str(result), "--save-detailed")
    assert found == json.loads(result.read_text())
    assert set(found) == VLLM_KEYS | DETAILS | {"kv"}
    assert found["input_lens"] == [37, 39, 10_000]
    assert found["output_lens"] == [4, 9, 0]
    assert (found["completed"], found["failed"], found["request_rate"]) == (2, 1, "trace")
    assert [bool(error) for error in found["errors"]] == [False, False, True]
    assert "raise max_model_len" in found["errors"][2]
    # One for each piece of text; tokens that came while the reader could not run are one piece.
    assert [1 <= len(itls) <= most for itls, most in zip(found["itls"], (3, 8), strict=False)] == [
        True,
        True,
    ]
    assert found["itls"][2] == []
    # A quarter of a second apart; only the first one may be late, by what a busy machine takes.
    assert found["start_times"][1] - found["start_times"][0] >= 0.15


def test_a_server_is_asked_the_same_and_measured_alike(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as (url, behaviour):
        found = bench(monkeypatch, capsys, *SMALL, "--url", url, "--seed", "3")
        assert set(found) == VLLM_KEYS
        assert (found["backend"], found["model_id"], found["completed"]) == ("openai", "tiny", 6)
        assert (found["total_input_tokens"], found["total_output_tokens"]) == (120, 30)
        prompts = [body["prompt"] for _, body in behaviour.asked]
        assert len(prompts) == 7  # with one to warm up
        assert len({tuple(prompt) for prompt in prompts}) == 7
        behaviour.asked.clear()
        bench(monkeypatch, capsys, *SMALL, "--url", url, "--seed", "3", "--num-warmups", "0")
        assert sorted(body["prompt"] for _, body in behaviour.asked) == sorted(prompts[1:])


def test_several_servers_get_the_same_in_turns_and_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = tmp_path / "result.json"
    with serving() as (one, first), serving() as (two, second):
        flags = (*SMALL, "--url", one, "--url", two, "--num-warmups", "0")
        found = bench(monkeypatch, capsys, *flags, "--rounds", "2", "--save-result", str(result))
        asked = [[body["prompt"] for _, body in each.asked] for each in (first, second)]
        assert quire(monkeypatch, "bench", *flags) == 0
        table = capsys.readouterr().out.splitlines()
    assert len(asked[0]) == 12
    for begin in (0, 6):
        own, other = (sorted(each[begin : begin + 6]) for each in asked)
        assert own == other
    assert not {*map(tuple, asked[0][:6])} & {*map(tuple, asked[0][6:])}
    assert found == json.loads(result.read_text())
    assert (found["urls"], found["num_rounds"], found["failed"]) == ([one, two], 2, [0, 0])
    assert [[each["completed"] for each in own] for own in found["rounds"]] == [[6, 6], [6, 6]]
    figure = found["figures"]["output_throughput"]
    ratios = sorted(b["output_throughput"] / a["output_throughput"] for a, b in found["rounds"])
    assert (figure["least_ratio"][1], figure["most_ratio"][1]) == pytest.approx(tuple(ratios))
    assert figure["ratio"] == pytest.approx([1.0, sum(ratios) / 2])
    assert table[:2] == [f"A  {one}", f"B  {two}"]
    assert "medians of 3 rounds" in table[2]
    assert table[4].split() == ["A", "B", "B", "/", "A"]
    assert any(row.startswith("P99 TTFT (ms)") and "[" in row for row in table)


def test_what_was_sent_is_a_trace_that_can_be_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.jsonl"
    flags = ("--random-prefix-len", "32", "--save-trace", str(path))
    bench(monkeypatch, capsys, *SMALL, *flags)
    sent = list(open_trace(path))
    assert [(each.input_tokens, each.output_tokens) for each in sent] == [(52, 5)] * 6
    assert len({each.hash_ids[:2] for each in sent}) == 1
    assert len({each.hash_ids[3] for each in sent}) == 6
    one_by_one = ("--max-concurrency", "1")
    again = bench(monkeypatch, capsys, "--num-prompts", "6", "--trace", str(path), *one_by_one)
    assert (again["total_input_tokens"], again["total_output_tokens"]) == (6 * 52, 6 * 5)
    assert again["kv"]["prefix_hit_rate"] > 0.4


def test_a_server_that_refuses_everything_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as (url, behaviour):
        behaviour.status = 400
        assert quire(monkeypatch, "bench", *SMALL, "--url", url, "--model", "m") == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "none of 1 requests succeeded" in err
    assert "HTTP 400" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--url", "ftp://x"), "--url 'ftp://x' is not an address"),
        (("--url", "http://127.0.0.1:1"), "Is the server up? --model names a"),
        (("--url", "http://x", "--cache", "paged"), "--cache: --url measures a server, whose own"),
        (("--url", "http://x", "--header", "no"), "--header 'no' must have the form NAME: VALUE"),
        (("--header", "a: b"), "--header needs --url"),
        (("--rounds", "2"), "--rounds needs several --url"),
        (("--url", "http://x", "--url", "http://y", "--rounds", "0"), "--rounds 0 must be at"),
        (
            ("--url", "http://x", "--url", "http://y", "--save-detailed"),
            "--save-detailed is of one server",
        ),
        (("--num-prompts", "0"), "--num-prompts 0 must be at least 1"),
        (("--num-warmups", "-1"), "--num-warmups -1 must be at least 0"),
        (("--max-concurrency", "0"), "--max-concurrency 0 must be at least 1"),
        (("--request-rate", "0"), "--request-rate 0.0 must be above 0"),
        (("--random-input-len", "0"), "--random-input-len 0 must be at least 1"),
        (("--goodput", "speed:5"), "--goodput 'speed:5' must be one of ttft, tpot, e2el"),
        (("--metric-percentiles", "a"), "--metric-percentiles 'a' must be from 0"),
        (("--trace", "/no/such.csv"), "trace /no/such.csv cannot be read: No such file"),
        (("--trace", "README.md"), "is of no known format; known: Azure's"),
        (("--trace-max-skipped", "-1"), "--trace-max-skipped -1 must be at least 0"),
        (("--save-trace", "/no/such/folder/x.jsonl"), "no such folder"),
        (("--save-result", "/no/such/folder/x.json"), "no such folder"),
        (("--random-input-len", "5000"), "none of 1 requests succeeded"),
        (("--cache", "magic"), "cache='magic' is no cache strategy"),
        (("serve", "--num-prompts", "4"), "serve is a command of vllm bench"),
    ],
)
def test_bad_input_is_one_clear_line(
    flags: tuple[str, ...],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    assert quire(monkeypatch, "bench", *flags) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert said in " ".join(captured.err.split())


def test_the_help_teaches_with_examples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert quire(monkeypatch, "bench", "--help") == 0
    out = capsys.readouterr().out
    for words in (
        "quire bench --url http://localhost:8000",
        "from n·(1−r) to n·(1+r)",
        "ttft:500,tpot:50,e2el:9000",
        "--kv-cache-memory-bytes",
        "--no-ignore-eos",
    ):
        assert words in out


def test_it_says_how_far_it_is_and_what_was_done_when_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result, sent = tmp_path / "result.json", tmp_path / "sent.jsonl"
    flags = (*SMALL, "--max-concurrency", "1", "--num-warmups", "0", "--save-result", str(result))
    with serving() as (url, behaviour):
        assert quire(monkeypatch, "bench", "--url", url, *flags) == 0
        captured = capsys.readouterr()
        assert "sending: 6 of 6 done" in captured.err
        assert "stopped" not in captured.err
        own, asked, ended = behaviour.events, len(behaviour.asked), threading.Event()

        def events(body: dict[str, Any]) -> list[str]:
            if len(behaviour.asked) == asked + 4:  # the fourth is not answered any more
                os.kill(os.getpid(), signal.SIGINT)
                ended.wait(60)
            return own(body)

        monkeypatch.setattr(behaviour, "events", events)
        # A shell has its background jobs ignore the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        code = quire(monkeypatch, "bench", "--url", url, *flags, "--save-trace", str(sent))
        signal.signal(signal.SIGINT, before)
        ended.set()
    captured = capsys.readouterr()
    assert code == 128 + signal.SIGINT
    assert "stopped after 3 of 6 requests" in " ".join(captured.err.split())
    assert f"{'Successful requests:':<40} 3" in captured.out
    assert json.loads(result.read_text())["completed"] == 3
    assert len(sent.read_text().splitlines()) == 1 + 3  # after its own heading
