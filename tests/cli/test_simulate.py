"""``quire simulate``: figures of traffic from the command line, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli import command_line
from quire.errors import QuireError
from quire.planner.simulation.cost_model import FittedCosts
from traces.files import COUNTED, rows


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = (
        {"timestamp": 200 * i, "input_length": 600, "output_length": 20, "hash_ids": [0, i % 3]}
        for i in range(12)
    )
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(command_line(["simulate"]), ["simulate", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_one_json_object_with_a_variant_for_each_of_a_list(trace: Path) -> None:
    said = json.loads(
        run(trace, "--cache", "paged,growing", "--kv-cache-memory-bytes", "64MiB,256MiB", "--json")
    )
    assert [v["name"] for v in said["variants"]] == [
        "paged 64MiB", "paged 256MiB", "growing 64MiB", "growing 256MiB",
    ]  # fmt: skip
    for variant in said["variants"]:
        assert variant["num_finished"]["length"] + variant["num_refused"] == 12
    assert said["variants"][1]["hit_rate"] > 0 == said["variants"][3]["hit_rate"]


def test_a_table_says_where_the_speed_is_from(trace: Path) -> None:
    said = run(trace, "--slo-ttft", "1")
    for word in ("utilization", "TTFT p50", "never seen", "roofline", "… finished"):
        assert word in said


TIERED = (
    *("--model", "Llama-3.1-8B", "--kv-cache-memory-bytes", "128MiB", "--max-model-len", "768"),
    *("--kv-tier", "memory:?size=1GiB", "--kv-tier", "file:/kv", "--kv-tier-write", "always"),
    *("--tier-speed", "memory=25,25", "--tier-speed", "file=6,3,0.1"),
)


def test_tiers_behind_the_memory(trace: Path, tmp_path: Path) -> None:
    """In the table, as JSON, and on the page: what they hold, found, saved and wasted."""
    rows = (
        {"timestamp": 200 * i, "input_length": 600, "output_length": 20, "hash_ids": [i % 4, 9]}
        for i in range(16)
    )  # of which the memory holds one
    trace.write_text("\n".join(map(json.dumps, rows)) + "\n")
    page = tmp_path / "page.html"
    table = " ".join(run(trace, *TIERED, "--report", page).split())
    for words in (
        *("that came in time", "seconds of computing saved", "tokens loaded for nothing"),
        *("memory: holds", "file:/kv: holds", "25 GB/s read", "of each replica"),
    ):
        assert words in table
    html = page.read_text(encoding="utf-8")
    for words in ("Tiers: blocks outside the KV memory", "file:/kv", "loads too late"):
        assert words in html
    (variant,) = json.loads(run(trace, *TIERED, "--json"))["variants"]
    tiers = variant["tiers"]
    assert tiers["hit_tokens"] == sum(tier["hit_tokens"] for tier in tiers["tiers"]) > 0
    assert tiers["saved_s"] > 0
    assert "Tiers:" not in _page_without(trace, tmp_path)


def test_prefill_replicas_compute_prompts_for_the_others(trace: Path) -> None:
    flags = ("--replicas", "2", "--prefill-replicas", "1", "--tier-speed", "peer=25,25")
    said = run(trace, *flags, "--rate", "40")
    for words in ("prompts computed apart", "by prefill replicas", "prefill replicas idle"):
        assert words in said
    assert "25 GB/s read" in said
    (variant,) = json.loads(run(trace, *flags, "--json"))["variants"]
    assert sum(variant["prefill"]["num_prompts"].values()) == 12
    assert variant["num_finished"]["length"] == 12


def _page_without(trace: Path, tmp_path: Path) -> str:
    page = tmp_path / "without.html"
    run(trace, "--report", page)
    return page.read_text(encoding="utf-8")


def test_requests_and_memory_for_perfetto(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "events.json"
    run(trace, "--replicas", "2", "--chrome-trace", path)
    events = json.loads(path.read_text())
    begun = [e for e in events if e["ph"] == "b" and e["name"] == "generates"]
    assert len(begun) == 12
    assert {e["pid"] for e in begun} == {0, 1}
    assert any(e["ph"] == "C" for e in events)


def test_traffic_that_comes_faster_waits_longer(trace: Path) -> None:
    slow, fast = (
        json.loads(run(trace, "--rate", rate, "--max-num-seqs", "1", "--json"))["variants"][0]
        for rate in ("1", "1000")
    )
    assert fast["latencies"]["ttft_s"]["p99"] > slow["latencies"]["ttft_s"]["p99"]
    assert fast["duration_s"] < slow["duration_s"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rate", "0"], "--rate 0"),
        (["--replicas", "0"], "--replicas 0"),
        (["--prefill-replicas", "-1"], "--prefill-replicas -1"),
        (["--tier-speed", "peer=1,1"], "there are none: give --prefill-replicas"),
        (
            ["--prefill-replicas", "1", "--cache", "growing"],
            "prefill_replicas needs what kv_tier does: kv_tier needs blocks",
        ),
        (
            ["--replicas", "60", "--prefill-replicas", "9", "--routing", "prefix-aware"],
            "--replicas 60 and --prefill-replicas 9 is too many",
        ),
        (["--routing", "random"], "known: round-robin"),
        (["--num-requests", "0"], "--num-requests 0"),
        (["--door-delay", "-1"], "--door-delay -1 must be from 0"),
        (["--device", "abacus"], "abacus"),
        (["--calibration", "nowhere.json"], "nowhere.json cannot be read"),
        (["--cache", "paged,stacked"], "stacked"),
        (["--kv-tier", "memory:"], "needs a size"),
        (["--tier-speed", "file=6,3"], "no kv_tier is of the kind 'file': there is none"),
        (["--kv-tier", "file:/kv", "--tier-speed", "file=6"], "file=6,3 or redis=1,1,0.5"),
        (["--kv-tier", "file:/kv", "--cache", "growing"], "use cache=paged"),
        (["--cache", "paged,virtual", "--chrome-trace", "x.json"], "one simulation"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_words(
    trace: Path, flags: list[str], message: str
) -> None:
    with pytest.raises(QuireError, match=message):
        run(trace, *flags)


def test_a_calibration_says_which_strategies_it_was_not_taken_with(
    trace: Path, tmp_path: Path
) -> None:
    calibration = tmp_path / "here.json"
    FittedCosts(step_s=0.01, about={"machine": "m", "model": "demo", "cache": "paged"}).write(
        calibration
    )
    own = ("--calibration", str(calibration), "--kv-cache-memory-bytes", "1GiB")
    assert "not compared" not in run(trace, *own, "--cache", "paged")
    said = " ".join(run(trace, *own, "--cache", "growing,paged,virtual").split())
    assert "measured with --cache paged and assumed for growing, virtual too" in said
    with pytest.raises(QuireError, match=r"was measured with demo, and this is .*Llama-3\.1-8B"):
        run(trace, "--model", "Llama-3.1-8B", *own)


def test_the_door_takes_what_was_measured_or_is_said(trace: Path, tmp_path: Path) -> None:
    here, own = tmp_path / "here.json", ("--kv-cache-memory-bytes", "1GiB", "--replicas", "2")
    firsts, notes = list[float](), list[str]()
    for costs, more in (
        (FittedCosts(step_s=0.01), ()),
        (FittedCosts(step_s=0.01, door_s=0.02, door_token_s=1e-4), ()),
        (FittedCosts(step_s=0.01, door_s=0.02, door_token_s=1e-4), ("--door-delay", "5")),
    ):
        costs.write(here)
        said = json.loads(run(trace, *own, "--calibration", here, *more, "--json"))
        firsts.append(said["variants"][0]["latencies"]["ttft_s"]["mean"])
        notes.append(" ".join(said["notes"]))
    plain_s, measured_s, said_s = firsts
    assert measured_s == pytest.approx(plain_s + 0.02 + 600 * 1e-4)
    assert said_s == pytest.approx(plain_s + 0.005)
    assert ["door: measured, 20 ms" in each for each in notes] == [False, True, False]


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match=r"nowhere\.csv"):
        run(tmp_path / "nowhere.csv")


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    """A trace that says when requests came and how long they were, and no more."""
    path = tmp_path / "lengths.csv"
    rows = [f"2026-01-31 12:00:{i:02d}.5,600,20" for i in range(12)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def test_a_trace_without_ids_says_so_and_has_no_prefix_cache(lengths: Path, trace: Path) -> None:
    said = " ".join(run(lengths).split())
    assert "the trace does not tell which prompts begin alike" in said
    assert "prompt tokens cached not looked up" in said
    assert "never seen" not in said
    assert "… only cached 0 B" in said
    for routing in ("least-loaded", "prefix-aware"):
        (found,) = json.loads(run(lengths, "--replicas", "2", "--routing", routing, "--json"))[
            "variants"
        ]
        assert found["prefix_query_tokens"] == 0
        assert found["cached_bytes"] == 0
        assert found["num_finished"]["length"] == 12
    both = json.loads(run(lengths, trace, "--json"))
    assert [v["prefix_query_tokens"] > 0 for v in both["variants"]] == [False, True]
    with pytest.raises(QuireError, match="tiers have nothing to find"):
        run(lengths, *TIERED)


def test_a_list_of_lengths_is_refused_with_the_columns_to_write(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("prompt,completion\n10,20\n")
    with pytest.raises(QuireError, match="TIMESTAMP,ContextTokens,GeneratedTokens"):
        run(path)


def test_the_script_of_the_page_writes_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "traces.md"
    text = page.read_text(encoding="utf-8").partition("## Requests of your own")[2]
    script = text.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    Path("requests.jsonl").write_text(rows(COUNTED))
    exec(compile(script, str(page), "exec"), {})
    (found,) = json.loads(run("trace.csv", "--json"))["variants"]
    assert found["num_finished"]["length"] == len(COUNTED)
    assert found["num_input_tokens"] == sum(row["prompt_tokens"] for row in COUNTED)


def test_no_torch_is_imported(trace: Path) -> None:
    import subprocess

    code = (
        "import sys; from quire.cli import command_line\n"
        "app = command_line(['simulate'])\n"
        f"app(['simulate', {str(trace)!r}, '--json'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_traffic_is_drawn_where_no_trace_is_given() -> None:
    def asked(*flags: str) -> dict[str, Any]:
        (found,) = json.loads(run(*flags, "--num-requests", "40", "--json"))["variants"]
        return found

    own = ("--random-input-len", "40", "--random-output-len", "5", "--request-rate", "50")
    plain, again = asked(*own), asked(*own)
    assert plain == again
    assert (plain["num_requests"], plain["num_output_tokens"]) == (40, 200)
    assert (plain["prefix_query_tokens"], plain["hit_rate"]) == (1600, 0.0)
    assert asked(*own, "--seed", "1")["duration_s"] != plain["duration_s"]
    assert asked(*own, "--burstiness", "0.1")["num_requests"] == 40
    shared = asked(*own, "--random-prefix-len", "64")
    assert shared["prefix_query_tokens"] == 40 * 104
    assert shared["hit_rate"] > 0.3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--request-rate", "0"), "must be a number above 0"),
        (("--burstiness", "0"), "--burstiness 0.0 must be above 0"),
        (("--random-input-len", "-1"), "must be from 1 to"),
        (("--random-prefix-len", "-1"), "prefix_tokens -1"),
    ],
)
def test_what_cannot_be_drawn(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(QuireError, match=message):
        run(*flags)


def test_a_trace_is_not_drawn_too(trace: Path) -> None:
    with pytest.raises(QuireError, match="leave them out with a trace"):
        run(trace, "--request-rate", "3")
