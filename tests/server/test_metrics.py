"""What a scrape says: true, in vLLM's names, whatever the engine does meanwhile."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from engine.test_async_llm import run, until
from engine.test_llm import GREEDY, model_of, prompts, small
from engine.test_offloading import kind, made, offload, texts
from engine.test_offloading import until as until_it_is
from quire import LLM, AsyncLLM
from quire.engine.statistics import FINISH_REASONS
from quire.kv.interface import found_block_size
from quire.server.dashboard.snapshot import about
from quire.server.metrics import FAMILIES, REJECTIONS, Metrics
from quire.tiers.host_memory import HostMemoryTier
from tiny import tokens

LABELS = {"model_name": "tiny", "engine": "0"}
ROUTES = ("/v1/completions", "/v1/responses/{response_id}")
SMALL: dict[str, Any] = dict(max_model_len=128, kv_cache_memory_bytes="64MB", max_num_seqs=8)
REFERENCE = Path(__file__).parents[2] / "docs/reference/metrics.md"

# As vLLM 0.33 exposes them, for a model of 128 tokens: name, labels, bounds of its buckets.
OF_ENGINE = {"model_name", "engine"}
VLLM: dict[str, set[str]] = {
    "vllm:num_requests_running": OF_ENGINE,
    "vllm:num_requests_waiting": OF_ENGINE,
    "vllm:num_requests_waiting_by_reason": OF_ENGINE | {"reason"},
    "vllm:kv_cache_usage_perc": OF_ENGINE,
    "vllm:corrupted_requests_total": OF_ENGINE,
    "vllm:prefix_cache_queries_total": OF_ENGINE,
    "vllm:prefix_cache_hits_total": OF_ENGINE,
    "vllm:num_preemptions_total": OF_ENGINE,
    "vllm:prompt_tokens_total": OF_ENGINE,
    "vllm:prompt_tokens_by_source_total": OF_ENGINE | {"source"},
    "vllm:prompt_tokens_cached_total": OF_ENGINE,
    "vllm:generation_tokens_total": OF_ENGINE,
    "vllm:request_success_total": OF_ENGINE | {"finished_reason"},
    "vllm:admission_rejections_total": {"model_name", "reason"},
    "vllm:spec_decode_num_drafts_total": OF_ENGINE,
    "vllm:spec_decode_num_draft_tokens_total": OF_ENGINE,
    "vllm:spec_decode_num_accepted_tokens_total": OF_ENGINE,
    "vllm:external_prefix_cache_queries_total": OF_ENGINE,
    "vllm:external_prefix_cache_hits_total": OF_ENGINE,
    "vllm:kv_offload_tiering_read_bytes_total": OF_ENGINE | {"tier"},
    "vllm:kv_offload_tiering_read_time_total": OF_ENGINE | {"tier"},
    "vllm:kv_offload_tiering_write_bytes_total": OF_ENGINE | {"tier"},
    "vllm:kv_offload_tiering_write_time_total": OF_ENGINE | {"tier"},
    "vllm:kv_offload_tiering_backpressure_stores_dropped_total": OF_ENGINE | {"tier"},
}
_TOKENS = "1.0 2.0 5.0 10.0 20.0 50.0 100.0"
_REQUEST = (
    "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 "
    "1920.0 7680.0"
)
_TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
BUCKETS = {
    "vllm:time_to_first_token_seconds": (
        "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 "
        "80.0 160.0 640.0 2560.0"
    ),
    "vllm:inter_token_latency_seconds": _TOKEN,
    "vllm:request_time_per_output_token_seconds": _TOKEN,
    "vllm:e2e_request_latency_seconds": _REQUEST,
    "vllm:request_queue_time_seconds": _REQUEST,
    "vllm:request_inference_time_seconds": _REQUEST,
    "vllm:request_prefill_time_seconds": _REQUEST,
    "vllm:request_decode_time_seconds": _REQUEST,
    "vllm:request_prompt_tokens": _TOKENS,
    "vllm:request_prefill_kv_computed_tokens": _TOKENS,
    "vllm:request_generation_tokens": _TOKENS,
    "vllm:request_max_num_generation_tokens": _TOKENS,
    "vllm:request_params_max_tokens": _TOKENS,
    "vllm:request_params_n": "1.0 2.0 5.0 10.0 20.0",
    "vllm:request_num_preemptions": "1.0 2.0 3.0 4.0 5.0 10.0 20.0",
    "vllm:kv_offload_tiering_promotion_latency_seconds": (
        "0.0001 0.00025 0.0005 0.001 0.0025 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1.0 2.5 5.0 10.0"
    ),
    "vllm:iteration_tokens_total": (
        "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0"
    ),
}


@pytest.fixture
def llm() -> Iterator[LLM]:
    with small(kv_tier=("memory:?size=8MiB",), kv_tier_write="never") as own:
        yield own


class Scrape:
    """What Prometheus makes of an answer."""

    def __init__(self, metrics: Metrics) -> None:
        self.text = metrics.render()[0].decode()
        self.families = list(parse(self.text))
        self.samples = [sample for family in self.families for sample in family.samples]
        self.names = {sample.name for sample in self.samples}

    def __call__(self, name: str, **labels: str) -> float:
        """The sum over all samples of this name that have these labels."""
        found = [s for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"{name}{labels} is not exported"
        return sum(sample.value for sample in found)


# -- what is exported -----------------------------------------------------------------------------


def test_names_and_labels_are_those_of_vllm(llm: LLM) -> None:
    scrape = Scrape(Metrics(llm, "tiny"))
    for name, labels in VLLM.items():
        found = {frozenset(sample.labels) for sample in scrape.samples if sample.name == name}
        assert found == {frozenset(labels)}, name
    for name, bounds in BUCKETS.items():
        buckets = [s for s in scrape.samples if s.name == f"{name}_bucket"]
        assert [s.labels["le"] for s in buckets] == [*bounds.split(), "+Inf"], name
        labels = OF_ENGINE | {"le"} | ({"tier"} if "tiering" in name else set())
        assert {frozenset(s.labels) for s in buckets} == {frozenset(labels)}
        for part in ("sum", "count"):
            assert scrape(f"{name}_{part}", **LABELS) == 0
    config = next(s for s in scrape.samples if s.name == "vllm:cache_config_info")
    assert (config.labels["block_size"], config.labels["engine"]) == ("16", "0")
    assert int(config.labels["num_gpu_blocks"]) == 64_000_000 // (16 * 1024)


def test_a_block_is_shown_as_large_as_it_is() -> None:
    """Where blocks of the option's size fill no whole page, it takes as many tokens as do."""
    with small(cache="virtual", kv_cache_dtype="int8_per_token_head") as llm:
        size = found_block_size(llm.accounting, 0)
        assert size > llm.config.block_size
        samples = Scrape(Metrics(llm, "tiny")).samples
        (labels,) = (s.labels for s in samples if s.name == "vllm:cache_config_info")
        assert labels["block_size"] == str(size)
        block_bytes = sum(group.bytes_for(size) for group in llm.spec.groups)
        assert labels["num_gpu_blocks"] == str(llm.elastic.capacity_bytes // block_bytes)
        assert about(llm, chats=False).block_size == size


def test_every_family_is_exported_once_and_with_its_type(llm: LLM) -> None:
    families = {f.name: f for f in Scrape(Metrics(llm, "tiny")).families}
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        if family.name != "http_requests_total":  # no client has asked for anything yet
            shown = family.name if family.kind != "counter" else family.name[: -len("_total")]
            assert families[shown].type == family.kind
            assert families[shown].documentation == family.meaning


# -- what it says ---------------------------------------------------------------------------------


def test_figures_are_those_of_the_engine(llm: LLM) -> None:
    metrics = Metrics(llm, "tiny")
    prompt = tokens(1, 40, seed=1)[0].tolist()
    for _ in range(2):
        llm.generate([prompt], replace(GREEDY, n=1))
    llm.generate([prompts()[0]], replace(GREEDY, n=3, temperature=1.0, seed=1))
    scrape, short = Scrape(metrics), len(prompts()[0])
    assert scrape("vllm:prompt_tokens_total", **LABELS) == 40 + 40 + short
    # The answer has filled the block that the prompt ends in: all but the last token are found.
    assert scrape("vllm:prompt_tokens_cached_total") == 39
    assert scrape("vllm:prompt_tokens_by_source_total", source="local_compute") == 41 + short
    assert scrape("vllm:generation_tokens_total") == 5 * 20
    assert scrape("vllm:prefix_cache_queries_total") == 80 + short
    assert scrape("vllm:prefix_cache_hits_total") == 39
    assert scrape("quire:prefix_cache_misses_total", reason="unknown") == 39 + short - 1
    assert scrape("quire:prefix_cache_misses_total") == 39 + short - 1
    assert scrape("vllm:request_success_total", finished_reason="length") == 5
    assert scrape("vllm:e2e_request_latency_seconds_count") == 5
    assert scrape("vllm:request_params_n_sum") == 5
    assert scrape("vllm:inter_token_latency_seconds_count") == 5 * 19
    usage = llm.usage()
    for state in ("reserved", "committed", "used", "cached", "wasted"):
        assert scrape("quire:kv_bytes", state=state) == getattr(usage, f"{state}_bytes")
    assert scrape("quire:kv_capacity_bytes") == llm.elastic.capacity_bytes == 64_000_000
    assert scrape("vllm:kv_cache_usage_perc") == 0, "what is only cached is free"


def test_gauges_are_those_of_the_moment() -> None:
    with small(max_num_seqs=2) as llm:
        metrics = Metrics(llm, "tiny")
        for prompt in prompts():
            llm.start(llm.request(prompt, replace(GREEDY, n=2)), lambda _: None)
        llm.step()
        scrape = Scrape(metrics)
        assert scrape("vllm:num_requests_running") == 2
        assert scrape("vllm:num_requests_waiting") == 6
        # Two prompts are computed, and their second continuations wait for seats as the others do.
        assert scrape("vllm:num_requests_waiting_by_reason", reason="capacity") == 4
        assert scrape("vllm:num_requests_waiting_by_reason", reason="deferred") == 2
        assert scrape("quire:num_requests_waiting_by_reason", reason="max_num_seqs") == 4
        assert scrape("quire:num_requests_waiting_by_reason", reason="sibling") == 2
        assert scrape("quire:num_requests_waiting_by_reason") == 6
        held = scrape("quire:kv_bytes", state="committed")
        assert scrape("vllm:kv_cache_usage_perc") == held / scrape("quire:kv_ceiling_bytes") > 0
        assert scrape("quire:engine_up") == 1
        available = scrape("quire:memory_bytes", state="available")
        assert 0 < available < scrape("quire:memory_bytes", state="total")


def test_a_lowered_ceiling_is_seen(llm: LLM) -> None:
    llm.resize("32MB")
    scrape = Scrape(Metrics(llm, "tiny"))
    assert scrape("quire:kv_ceiling_bytes") == scrape("quire:kv_capacity_bytes") == 32_000_000


# -- when it is asked -----------------------------------------------------------------------------


def in_time(function: Callable[[], Any]) -> Any:
    """What a function gives in a thread of its own, which does not wait for ever."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it waits"
    return found[0]


def test_a_scrape_does_not_wait_for_a_step() -> None:
    entered, go_on = threading.Event(), threading.Event()

    async def main() -> None:
        async with AsyncLLM(model_of("llama"), **SMALL) as llm:
            await llm.complete(prompts()[0], GREEDY)
            metrics, run_step = Metrics(llm.llm, "tiny"), llm.llm.engine._runner.run
            before = Scrape(metrics)

            def slow(plan: Any) -> Any:
                entered.set()
                assert go_on.wait(100)
                return run_step(plan)

            llm.llm.engine._runner.run = slow  # type: ignore[method-assign]
            task = asyncio.create_task(llm.complete(prompts()[1], GREEDY))
            await asyncio.to_thread(entered.wait, 100)
            try:
                scrape = in_time(lambda: Scrape(metrics))
            finally:
                go_on.set()
            assert scrape("vllm:num_requests_running") == 1
            assert scrape("vllm:generation_tokens_total") == 20
            # The step has the cache: what was noted before it is said.
            assert scrape("quire:kv_bytes") == before("quire:kv_bytes") > 0
            await task
            assert Scrape(metrics)("vllm:generation_tokens_total") == 40

    run(main())


def test_many_scrapes_beside_steps_are_sound() -> None:
    async def main() -> None:
        async with AsyncLLM(model_of("llama"), **SMALL) as llm:
            metrics, over, scrapes = Metrics(llm.llm, "tiny"), threading.Event(), list[Scrape]()

            def scrape() -> None:
                while not over.is_set():
                    scrapes.append(Scrape(metrics))

            thread = threading.Thread(target=scrape)
            thread.start()
            try:
                for _ in range(6):
                    await asyncio.gather(*(llm.complete(p, GREEDY) for p in prompts()))
                await until(lambda: len(scrapes) > 5)
            finally:
                over.set()
                thread.join()
            totals = [s("vllm:generation_tokens_total") for s in scrapes]
            assert totals == sorted(totals)
            for each in scrapes:
                assert each("quire:kv_bytes", state="wasted") >= 0
                buckets = [
                    s.value
                    for s in each.samples
                    if s.name == "vllm:inter_token_latency_seconds_bucket"
                ]
                assert buckets == sorted(buckets)
                assert buckets[-1] == each("vllm:inter_token_latency_seconds_count")

    run(main())


def test_a_dead_engine_is_scraped() -> None:
    async def main() -> None:
        llm = AsyncLLM(model_of("llama"), **SMALL)
        metrics = Metrics(llm.llm, "tiny")
        await llm.complete(prompts()[0], GREEDY)

        def dead(plan: Any) -> Any:
            raise SystemError("the machine is on fire")

        llm.llm.engine.scheduler.plan = dead  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="on fire"):
            await llm.complete(prompts()[1], GREEDY)
        await until(lambda: llm.llm.is_closed)
        await llm.aclose()
        scrape = in_time(lambda: Scrape(metrics))
        assert scrape("quire:engine_up") == 0
        assert scrape("vllm:request_success_total", finished_reason="length") == 1
        assert scrape("vllm:request_success_total", finished_reason="error") == 1
        assert scrape("vllm:num_requests_running") == scrape("vllm:num_requests_waiting") == 0
        assert scrape("quire:kv_bytes") == 0

    run(main())


def test_batches_of_events_are_counted(llm: LLM) -> None:
    pytest.importorskip("zmq")
    assert "quire:kv_event_batches_total" not in Scrape(Metrics(llm, "tiny")).names
    config = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:0"}
    with small(kv_events_config=config) as own:
        own.generate(prompts(), GREEDY)
        metrics = Metrics(own, "tiny")
    scrape = Scrape(metrics)  # what waited was sent before the end
    assert scrape("quire:kv_event_batches_total", outcome="published") > 0
    assert scrape("quire:kv_event_batches_total", outcome="dropped") == 0


# -- tiers ----------------------------------------------------------------------------------------


def test_tiers_are_told_by_name(tmp_path: Path) -> None:
    folder = f"file:{tmp_path}/records"
    with made(kv_tier=("memory:?size=8MiB", f"{folder}?size=64MiB")) as llm:
        metrics = Metrics(llm, "tiny")
        texts(llm)
        until_it_is(lambda: not offload(llm).has_more)
        llm.reset_prefix_cache()
        texts(llm)
        until_it_is(lambda: not offload(llm).has_more)
        scrape, report = Scrape(metrics), llm.tiers
        assert report is not None
        hits = scrape("vllm:external_prefix_cache_hits_total", **LABELS)
        asked = scrape("vllm:external_prefix_cache_queries_total")
        assert 0 < hits == scrape("quire:tier_hit_tokens_total", tier="memory") < asked
        assert scrape("quire:tier_hit_tokens_total", tier=folder) == 0
        for tier in ("memory", folder):
            assert scrape("vllm:kv_offload_tiering_write_bytes_total", tier=tier) > 0
            assert scrape("vllm:kv_offload_tiering_write_time_total", tier=tier) > 0
            assert scrape("quire:tier_used_bytes", tier=tier) > 0
            assert scrape("quire:tier_state", tier=tier, state="ok") == 1
            assert scrape("quire:tier_state", tier=tier) == 1
        told = {s.labels["tier"] for s in scrape.samples if s.name == "quire:tier_records"}
        assert told == {"memory"}, "a folder does not count its records"
        assert scrape("quire:tier_capacity_bytes", tier=folder) == 64 * 2**20
        read = scrape("vllm:kv_offload_tiering_read_bytes_total", tier="memory")
        assert read == report.tiers[0].loaded_bytes > 0
        latency = "vllm:kv_offload_tiering_promotion_latency_seconds"
        # A prompt that is computed sooner than its blocks are loaded is not loaded.
        assert 0 < scrape(f"{latency}_count", tier="memory") <= 4
        assert scrape(f"{latency}_count", tier=folder) == 0
        assert scrape("quire:tier_blocks_total", outcome="copied") > 0
        for name in ("bad_records_total", "errors_total", "late_loads_total"):
            assert scrape(f"quire:tier_{name}") == 0, name
        for reason in ("late", "evicted"):
            assert scrape("quire:tier_wasted_tokens_total", reason=reason) == 0
    after = Scrape(metrics)
    assert after("quire:tier_used_bytes", tier="memory") == 0
    assert after("quire:tier_used_bytes", tier=folder) > 0
    assert after("vllm:external_prefix_cache_hits_total") == hits
    with small() as llm:
        without = Scrape(Metrics(llm, "tiny"))
        assert without("vllm:external_prefix_cache_hits_total") == 0
        assert not [name for name in without.names if "tier" in name]


def test_a_tier_that_hangs_delays_no_scrape() -> None:
    go_on, entered = threading.Event(), threading.Event()

    def hanging(*args: Any) -> Any:
        tier: Any = HostMemoryTier(2**23, args[1])
        own = tier.usage

        def store(*_: Any) -> int:
            entered.set()
            assert go_on.wait(60)
            return 0

        def usage() -> Any:
            assert not entered.is_set() or go_on.wait(60)
            return own()

        tier.store, tier.usage = store, usage
        return tier

    with kind("hanging", hanging), made(kv_tier=("hanging:",)) as llm:
        metrics = Metrics(llm, "tiny")
        texts(llm)
        assert entered.wait(60)
        try:
            scrape = in_time(lambda: Scrape(metrics))
        finally:
            go_on.set()
        assert scrape("quire:tier_records", tier="hanging") == 0
        assert scrape("quire:tier_blocks_total", outcome="copied") > 0


# -- labels ---------------------------------------------------------------------------------------


def test_refusals_and_answers_are_counted(llm: LLM) -> None:
    metrics = Metrics(llm, "tiny")
    for route in ROUTES:
        metrics.counts.know(route)
    for reason in REJECTIONS:
        assert Scrape(metrics)("vllm:admission_rejections_total", reason=reason) == 0
    metrics.counts.note_rejection("max_num_queued_reqs")
    metrics.counts.note_rejection("max_num_queued_reqs")
    metrics.counts.note_answer("POST", ROUTES[1], 503)
    scrape = Scrape(metrics)
    queued = dict(model_name="tiny", reason="max_num_queued_reqs")
    assert scrape("vllm:admission_rejections_total", **queued) == 2
    assert scrape("http_requests_total", handler=ROUTES[1], method="POST", status="503") == 1
    with pytest.raises(ValueError, match="max_num_queued_reqs"):
        metrics.counts.note_rejection("because")  # type: ignore[arg-type]


def test_nothing_that_a_client_sends_becomes_a_label(llm: LLM) -> None:
    metrics = Metrics(llm, "tiny")
    for route in ROUTES:
        metrics.counts.know(route)
    empty = len(Scrape(metrics).samples)
    for number in range(1000):
        metrics.counts.note_answer(f"GET{number}", f"/v1/\r\n{number}", 600 + number)
    scrape = Scrape(metrics)
    assert len(scrape.samples) == empty + 1
    assert scrape("http_requests_total", handler="other", method="other", status="other") == 1000
    assert scrape("vllm:request_success_total") == 0
    reasons = {s.labels["finished_reason"] for s in scrape.samples if "finished_reason" in s.labels}
    assert reasons == set(FINISH_REASONS)


def test_a_name_of_several_lines_is_one(llm: LLM) -> None:
    scrape = Scrape(Metrics(llm, 'evil"}\r\nup 0\n\\'))
    assert "up" not in scrape.names
    assert {s.labels["model_name"] for s in scrape.samples if "model_name" in s.labels} == {
        'evil"}up 0\\'
    }
    assert "\r" not in scrape.text


# -- the board and the reference -------------------------------------------------------------------


def test_every_metric_of_the_board_is_exported(llm: LLM) -> None:
    metrics = Metrics(llm, "tiny")
    for route in ROUTES:
        metrics.counts.know(route)
    metrics.counts.note_answer("GET", ROUTES[0], 200)
    exported = Scrape(metrics).names
    board = json.loads(files("quire.server.metrics").joinpath("grafana.json").read_text("utf-8"))
    expressions = [t["expr"] for panel in board["panels"] for t in panel["targets"]]
    variables = [v["definition"] for v in board["templating"]["list"] if "definition" in v]
    wanted = set[str]()
    for expression in [*expressions, *variables]:
        found = re.findall(r"(?:vllm:|quire:|process_|http_)\w+", expression)
        assert found, expression
        assert expression.count("(") == expression.count(")")
        wanted |= set(found)
    assert wanted <= exported, wanted - exported
    assert {name for name in exported if name.startswith("quire:")} <= wanted
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_panels_of_the_board_do_not_overlap() -> None:
    board = json.loads(files("quire.server.metrics").joinpath("grafana.json").read_text("utf-8"))
    taken = set[tuple[int, int]]()
    for panel in board["panels"]:
        at = panel["gridPos"]
        own = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not own & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= own


def test_the_reference_has_every_metric() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in REFERENCE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `") and not line.startswith("| `quire:fleet_")
    ]
    want = [[f"`{f.name}`", f.kind, f.unit, ", ".join(f.labels) or "", f.meaning] for f in FAMILIES]
    assert rows == want
