"""Blocks that leave the pool and come back: the same texts, whatever a tier does meanwhile."""

import gc
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from conformance.covering import in_turn
from engine.simulation import Attic, replay
from engine.test_llm import ids, model_of, prompts
from kv.caches import sliding
from models.test_recurrent import HYBRIDS
from quire import LLM, SamplingParams
from quire.engine.kv_sizing import tier_bytes
from quire.engine.scheduling.block_carrier import columns_read
from quire.engine.scheduling.offload_policy import OffloadPolicy
from quire.errors import ConfigError, RequestError
from quire.kv.interface import ExternalBlocks
from quire.spec import Group
from quire.tiers import TIERS, Deadline, Tier, TierAddress, TierError
from quire.tiers.host_memory import HostMemoryTier
from quire.tiers.objects import ObjectTier
from tiers.faulty import FAULTS, FaultyTier
from tiers.redis_process import RedisProcess, needs_redis
from tiny import VOCAB, random_model

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
LENGTHS = (100, 75, 49, 64)
CACHES: dict[str, dict[str, Any]] = {
    "paged": dict(cache="paged"),
    "virtual, shared": dict(cache="virtual"),
    "int8": dict(cache="paged", kv_cache_dtype="int8_per_token_head"),
}


class Kept:
    """A kind of tier that outlives its engine, as a folder does."""

    def __init__(self, make: Any = HostMemoryTier) -> None:
        self._make = make
        self.tiers: dict[str, Tier] = {}

    def __call__(self, address: TierAddress, record_bytes: int, namespace: str) -> Tier:
        if namespace not in self.tiers:
            tier = self._make(64 * 2**20, record_bytes)
            tier.close = lambda: None
            self.tiers[namespace] = tier
        return self.tiers[namespace]


@contextmanager
def kind(name: str, make: Any) -> Iterator[None]:
    TIERS.register(name, make)
    try:
        yield
    finally:
        TIERS.unregister(name)


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept()
    with kind("kept", made):
        yield made


def made(model: Any = "llama", **options: Any) -> LLM:
    """An engine that thinks computing takes for ever, so that it waits for tiers."""
    defaults: dict[str, Any] = dict(
        max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes="4MiB", kv_tier_write="always"
    )
    llm = LLM(model_of(model) if isinstance(model, str) else model, **{**defaults, **options})
    llm.engine.scheduler.costs.note_step = lambda *_: None  # type: ignore[method-assign]
    return llm


def offload(llm: LLM) -> OffloadPolicy:
    found = llm.engine.scheduler.offload
    assert found is not None
    return found


def texts(llm: LLM, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, ...]]:
    return ids(llm.generate(prompts(lengths), GREEDY))


def until(holds: Any) -> None:
    """Wait for another thread."""
    stop_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < stop_s, "it never came"
        time.sleep(0.005)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("cache", "name"),
    in_turn(CACHES, ["llama", "gemma3", "deepseek_v3", "lfm2", "falcon_h1", "qwen3_next"]),
)
def test_an_engine_that_begins_anew_finds_what_another_one_has_stored(
    cache: str, name: str, kept: Kept
) -> None:
    """In every layout, with windows, latents and states: the same texts, mostly not computed."""
    model = random_model(HYBRIDS[name]()) if name in HYBRIDS else model_of(name)
    options = CACHES[cache]
    if name in HYBRIDS and cache == "int8":
        options = CACHES["paged"]
    with made(model, **options) as llm:
        expected = texts(llm)
    with made(model, **options, kv_tier=("kept:",)) as llm:
        assert texts(llm) == expected
        assert offload(llm).counts.stored_blocks
    with made(model, **options, kv_tier=("kept:",)) as llm:
        found = llm.generate(prompts(LENGTHS), GREEDY)
        assert ids(found) == expected
        cached = [each.num_cached_tokens for each in found]
        assert sum(cached) >= 0.5 * sum(LENGTHS), cached
        assert offload(llm).counts.hit_tokens == sum(cached)
        llm.engine.scheduler.check()


def test_engines_of_two_layouts_read_no_record_of_each_other(kept: Kept) -> None:
    """A block of one layer has as many bytes in both, in another order."""
    config = LlamaConfig(
        hidden_size=256, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=64, vocab_size=VOCAB, max_position_embeddings=256,
    )  # fmt: skip
    model, found = random_model(config), []
    for cache in ("paged", "virtual"):
        with made(model, cache=cache, kv_tier=("kept:",)) as llm:
            found.append(texts(llm))
            assert isinstance(llm.accounting, ExternalBlocks)
            assert llm.accounting.index.block_size == 16
            assert not offload(llm).counts.hit_tokens
    assert found[0] == found[1]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 30), st.integers(1, 30))
def test_what_is_read_of_a_window_is_brought(window: int, size: int, first: int, more: int) -> None:
    end = first + more
    group = Group(spec=sliding(window), layers=(0,))
    read = {token // size for token in range(max(0, end * size - window + 1), end * size)}
    assert {*columns_read(group, size, first, end)} == {n for n in read if n >= first}


def test_blocks_that_were_evicted_come_back() -> None:
    """A pool for two prompts, and a tier for all: in the second round little is computed."""
    with made(kv_cache_memory_bytes=256 * 1024, kv_offloading_size="8MiB") as llm:
        expected = texts(llm)
        for _ in range(3):
            assert texts(llm) == expected
        assert offload(llm).counts.hit_tokens >= 0.7 * sum(LENGTHS)
        llm.engine.scheduler.check()
        assert llm.accounting.usage().used_bytes == 0


def test_what_waits_to_be_stored_goes_out_while_the_engine_is_idle_and_when_it_ends(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two blocks are on the way out, and one step leaves most of them behind.
    monkeypatch.setattr("quire.engine.open_tiers.staging_bytes", lambda *_: 5 * 2**14)
    one = SamplingParams(max_tokens=1, temperature=0)
    with made(kv_tier=("kept:",)) as llm:
        llm.generate(prompts(LENGTHS), one)
        until(lambda: not offload(llm).has_more)
        counts = offload(llm).counts
        assert counts.stored_blocks >= sum(length // 16 for length in LENGTHS)
    with made(kv_tier=("kept:",)) as llm:
        llm.generate(prompts((101, 76, 50)), one)
    (tier,) = kept.tiers.values()
    stored = sum(length // 16 for length in (*LENGTHS, 101, 76, 50))
    assert (tier.usage().num_records or 0) >= stored


def test_records_of_a_broken_model_are_dropped(kept: Kept) -> None:
    """Where logits are no numbers, what a sequence computed is found by no other one."""
    with made(kv_tier=("kept:",)) as llm:
        texts(llm)
        until(lambda: not offload(llm).has_more)
    (tier,) = kept.tiers.values()
    before = tier.usage().num_records or 0
    with made(kv_tier=("kept:",)) as llm:
        sampler: Any = llm.engine._sampler
        sample = sampler.sample
        sampler.sample = lambda logits, plan: sample(torch.full_like(logits, torch.nan), plan)
        ends = llm.generate(prompts(LENGTHS[:1]), GREEDY)
        assert ends[0].finish_reason == "error"
        until(lambda: (tier.usage().num_records or 0) < before)
        sampler.sample = sample
        again = llm.generate(prompts(LENGTHS[:1]), GREEDY)
        assert not again[0].num_cached_tokens
        assert llm.statistics.num_corrupted == 1


def test_other_weights_end_the_use_of_tiers(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    model = random_model(model_of("llama").config)
    with made(model, kv_tier=("kept:",)) as llm:
        texts(llm)
        until(lambda: not offload(llm).has_more)
        (tier,) = kept.tiers.values()
        before = tier.usage().num_records
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        llm.reset_prefix_cache()
        found = llm.generate(prompts((*LENGTHS, 90)), GREEDY)
        assert "no block is stored in tiers or loaded from them any more" in caplog.text
    assert tier.usage().num_records == before
    with made(model, kv_tier=("kept:",)) as llm:  # a name of its own
        assert ids(llm.generate(prompts((*LENGTHS, 90)), GREEDY)) == ids(found)
    assert len(kept.tiers) == 2


def shared(address: TierAddress, record_bytes: int, namespace: str) -> Tier:
    tier: Any = HostMemoryTier(2**24, record_bytes)
    tier.traits = type(tier.traits)(is_shared=True, is_persistent=True)
    return tier


def test_what_cannot_be_is_refused_in_words(kept: Kept, tmp_path: Path) -> None:
    key, long_key = tmp_path / "key", tmp_path / "long key"
    key.write_bytes(b"short")
    long_key.write_bytes(bytes(4097))
    for options, said in (
        (dict(cache="growing"), "cache=growing"),
        (dict(enable_prefix_caching=False), "enable_prefix_caching"),
        (dict(kv_tier_key=str(key)), "at least 32"),
        (dict(kv_tier_key=str(long_key)), "more than 4,096 bytes"),
        (dict(kv_tier_key=str(tmp_path / "none")), "No such file"),
        (dict(kv_tier=("attic:x",)), "'attic' is no tier"),
        (dict(kv_tier=("/var/cache",)), "has no kind"),
        (dict(kv_tier="kept: x"), "has no kind.*%20 for a space"),
        (dict(kv_tier=(5,)), "a list of addresses, each a text"),
        (dict(kv_tier=5), "a list of addresses, each a text"),
        (dict(kv_tier_write="often"), "often"),
    ):
        with pytest.raises(ConfigError, match=said):
            made(**{"kv_tier": ("kept:",), **options})


def test_a_shared_tier_needs_a_key_or_trust(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    with kind("shared", shared):
        with pytest.raises(ConfigError, match="kv_tier_key"):
            made(kv_tier=("shared:",))
        for options in (dict(kv_tier_trusted=True), dict(kv_tier_key=str(key))):
            with made(kv_tier=("shared:",), **options) as llm:
                expected = texts(llm)
                until(lambda llm=llm: not offload(llm).has_more)
                llm.reset_prefix_cache()
                assert texts(llm) == expected
                assert offload(llm).counts.hit_tokens >= 0.8 * sum(LENGTHS)


@contextmanager
def back_end(name: str, folder: Path, seed: int) -> Iterator[Callable[[int, str], Tier]]:
    """What makes a tier of a kind, for records of so many bytes and a namespace."""
    if name == "memory":
        yield lambda record_bytes, _: HostMemoryTier(64 * 2**20, record_bytes)
    elif name == "objects":
        from obstore.store import LocalStore, MemoryStore

        store = LocalStore(folder) if seed % 2 else MemoryStore()
        yield lambda _, namespace: ObjectTier(store, "s3://bucket", namespace)
    elif name == "file":
        address = TierAddress.parse(f"file:{folder}")
        yield lambda record_bytes, namespace: TIERS["file"](address, record_bytes, namespace)
    else:
        server = RedisProcess(folder)
        try:
            address = TierAddress.parse(server.address)
            yield lambda record_bytes, namespace: TIERS["redis"](address, record_bytes, namespace)
        finally:
            server.kill()


def ask_a_faulty_tier(
    name: str, folder: Path, seed: int, num_rounds: int, patch: pytest.MonkeyPatch
) -> Counter[str]:
    """Have an engine answer prompts again and again. Returns: the faults that its tier had."""
    patch.setattr("quire.engine.scheduling.offload_policy._LONGEST_WAIT_S", 0.05)
    patch.setattr("quire.engine.offloading.storing._STORE_S", 0.05)
    patch.setattr("quire.engine.offloading.forgetting._DROP_S", 0.05)
    patch.setattr("quire.engine.offloading.forgetting._DROP_AGAIN_S", 0.0)
    patch.setattr("quire.tiers.guard._LONGEST_BREAK_S", 0.0)
    draw = random.Random(seed)
    with made() as llm:
        expected = dict(zip(LENGTHS, texts(llm), strict=True))
    with back_end(name, folder, seed) as make:

        def faulty(address: TierAddress, record_bytes: int, namespace: str) -> Tier:
            return FaultyTier(make(record_bytes, namespace), seed=seed, share=0.25)

        with (
            kind("faulty", faulty),
            made(
                kv_tier=("faulty:",), kv_tier_trusted=True, kv_cache_memory_bytes=320 * 1024
            ) as llm,
        ):
            (tier,) = offload(llm)._carrier.tiers
            for _ in range(num_rounds):
                lengths = tuple(draw.sample(LENGTHS, draw.randint(1, len(LENGTHS))))
                assert texts(llm, lengths) == [expected[length] for length in lengths]
                if draw.random() < 0.7:
                    llm.reset_prefix_cache()
                tier.trust()
            llm.engine.scheduler.check()
            assert offload(llm).counts.hit_tokens, "no block came back"
            return tier._tier.done


BACK_ENDS = ("memory", "file", pytest.param("redis", marks=needs_redis), "objects")


@pytest.mark.parametrize("name", BACK_ENDS)
def test_texts_are_the_same_whatever_a_tier_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = ask_a_faulty_tier(name, tmp_path, 1, 40, monkeypatch)
    assert len(done) >= 10, done


@pytest.mark.full
@pytest.mark.parametrize("name", BACK_ENDS)
def test_thousands_of_texts_are_the_same_whatever_a_tier_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each back end five thousand. How often a rare fault comes, the machine's speed decides."""
    done = Counter[str]()
    for seed in range(10):
        folder = tmp_path / str(seed)
        folder.mkdir()
        done += ask_a_faulty_tier(name, folder, seed, 200, monkeypatch)
    assert done.keys() == {*FAULTS}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Attic:
    """Nothing waits for the clock of this machine; a world has its own."""
    monkeypatch.setattr("quire.engine.offloading.forgetting._DROP_AGAIN_S", 0)
    monkeypatch.setattr("quire.engine.scheduling.offload_policy._LONGEST_WAIT_S", 1e9)
    return Attic()


def test_whole_engines_read_what_was_written_whatever_tiers_do(quick: Attic) -> None:
    """Engines of all kinds, one after the other, that share tiers which lie, lose and refuse."""
    for seed in range(12):
        replay(seed, quick)
    assert quick.num_hit_tokens > 40


@pytest.mark.full
def test_a_thousand_engines_read_what_was_written(quick: Attic) -> None:
    for seed in range(1000, 2000):
        replay(seed, quick)
    assert quick.num_hit_tokens > 5000
    assert quick.num_bad > 10


@pytest.mark.parametrize(("forgotten", "left"), [("second block", 1), ("all", 0)])
def test_what_is_being_forgotten_is_not_found(forgotten: str, left: int, kept: Kept) -> None:
    """Neither before each tier has forgotten it nor after."""
    with made(kv_tier=("kept:",)) as llm:
        texts(llm, LENGTHS[:1])
        until(lambda: not offload(llm).has_more)
        carrier: Any = offload(llm)._carrier
        load, jobs = carrier.load, list[Any]()
        carrier.load = lambda job, wait_s: jobs.append(job) or False
        llm.reset_prefix_cache()
        texts(llm, LENGTHS[:1])
        job, hold = jobs[0], threading.Event()

        def num_found() -> int:
            assert load(job, 10)
            until(lambda: carrier._done)
            carrier.release(*carrier.loaded())
            return int(job.end - job.first)

        assert num_found() == len(job.blocks) > 1
        carrier._storing.put(hold.wait)
        if forgotten == "all":
            carrier.clear()
        else:
            carrier.drop([job.blocks[1]])
        assert num_found() == left
        hold.set()
        carrier.wait_until_stored(10)
        assert num_found() == left


@pytest.mark.parametrize("is_wrong", [False, True])
def test_what_comes_from_a_far_tier_goes_to_the_nearer_one_unless_it_is_wrong(
    is_wrong: bool, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.scheduling.offload_policy._CLOSE_S", 0.1)  # in vain
    with made(kv_tier=("kept:",)) as llm:
        texts(llm)
        until(lambda: not offload(llm).has_more)
    with made(kv_tier=("memory:?size=8MiB", "kept:")) as llm:
        carrier: Any = offload(llm)._carrier
        release = carrier.release

        def judged(job: Any) -> None:
            job.is_wrong = is_wrong
            release(job)

        carrier.release = judged
        offload(llm).store = lambda **_: None  # type: ignore[method-assign]
        texts(llm)
        carrier.wait_until_stored(10)
        near, far = carrier.report()
        assert far.hit_tokens > 0
        assert (near.num_records or 0) == (0 if is_wrong else far.num_loaded)


# -- what is seen of tiers -------------------------------------------------------------------------


def test_a_report_says_what_tiers_hold_and_have_done(kept: Kept) -> None:
    with made() as llm:
        assert llm.tiers is None
        with pytest.raises(RequestError, match="no tiers"):
            llm.trust_tiers()
        with pytest.raises(RequestError, match="no tiers"):
            llm.reset_prefix_cache(reset_external=True)
    with made(kv_offloading_size="8MiB", kv_tier=("kept:", "memory:?size=1MiB")) as llm:
        texts(llm)
        until(lambda: not offload(llm).has_more)
        llm.reset_prefix_cache()
        texts(llm)
        report = llm.tiers
        assert report is not None
        assert [tier.name for tier in report.tiers] == ["memory", "kept", "memory (2)"]
        assert report.counts.hit_tokens == sum(tier.hit_tokens for tier in report.tiers) > 0
        near, far, last = report.tiers
        assert near.hit_tokens == report.counts.hit_tokens
        assert near.num_records == near.num_stored - near.num_dropped > 0
        assert near.loaded_bytes >= near.num_loaded * 1024 > 0
        assert sum(near.promotion_s.counts) == len(LENGTHS)
        assert near.promotion_s.sum > 0
        assert {near.state, far.state, last.state} == {"ok"}
        assert near.medium == "CPU"
        assert (near.used_bytes or 0) <= (near.capacity_bytes or 0) <= 8 * 2**20
        assert set(near.num_bad.values()) == set(near.num_errors.values()) == {0}
        with pytest.raises(RequestError, match=r"'file:' is none .*: memory, kept, memory \(2\)"):
            llm.trust_tiers("file:")
        assert report.why_off is None
    after = llm.tiers
    assert after is not None
    assert (after.tiers[0].num_records, after.tiers[0].num_stored) == (0, near.num_stored)


@pytest.mark.parametrize("name", ["falcon_h1", "gemma3"])
def test_hits_are_told_by_tier_also_where_states_stand_for_what_is_before_them(
    name: str, kept: Kept
) -> None:
    model = random_model(HYBRIDS[name]()) if name in HYBRIDS else model_of(name)
    with made(model, kv_tier=("kept:",)) as llm:
        texts(llm)
        until(lambda: not offload(llm).has_more)
        llm.reset_prefix_cache()
        texts(llm)
        assert llm.tiers is not None
        assert llm.tiers.tiers[0].hit_tokens == llm.tiers.counts.hit_tokens > 0


def test_what_tiers_have_is_forgotten_with_the_prefix_cache(kept: Kept) -> None:
    with made(kv_tier=("memory:?size=8MiB", "kept:")) as llm:
        expected = texts(llm)
        until(lambda: not offload(llm).has_more)
        assert llm.reset_prefix_cache(reset_external=True)
        assert llm.tiers is not None
        assert [tier.num_records for tier in llm.tiers.tiers] == [0, 0]
        found = llm.generate(prompts(LENGTHS), GREEDY)
        assert ids(found) == expected
        assert [each.num_cached_tokens for each in found] == [0] * len(LENGTHS)
        until(lambda: not offload(llm).has_more)
        llm.reset_prefix_cache()  # what was stored since is found
        assert sum(each.num_cached_tokens for each in llm.generate(prompts(LENGTHS), GREEDY)) > 0
        llm.start(llm.request(prompts(LENGTHS)[0], GREEDY), lambda _: None)
        llm.step()
        (kept_tier,) = kept.tiers.values()
        before = kept_tier.usage().num_records
        assert not llm.reset_prefix_cache(reset_external=True)
        assert kept_tier.usage().num_records == before
        llm.engine.scheduler.check()


def test_what_is_on_its_way_from_tiers_is_forgotten_too(kept: Kept) -> None:
    with made(kv_tier=("kept:",)) as llm:
        texts(llm, LENGTHS[:1])
        until(lambda: not offload(llm).has_more)
        assert llm.reset_prefix_cache()
        request = llm.request(prompts(LENGTHS)[0], GREEDY)
        llm.start(request, lambda _: None)
        offload(llm).bring = lambda *_, **__: None  # type: ignore[method-assign]
        carrier: Any = offload(llm)._carrier
        llm.engine.scheduler.plan()
        until(lambda: carrier._done)  # all of it lies in staging memory
        del offload(llm).bring
        assert llm.reset_prefix_cache(reset_external=True)
        while llm.step():
            pass
        assert offload(llm).counts.hit_tokens == 0
        assert offload(llm).counts.wasted_tokens == offload(llm).counts.late_tokens > 0
        llm.engine.scheduler.check()


def test_what_is_loaded_and_evicted_before_a_request_has_it_is_waste(kept: Kept) -> None:
    """A request ends when its blocks have come, and the next ones need their room."""
    with made(kv_tier=("kept:",), kv_cache_memory_bytes=256 * 1024) as llm:
        texts(llm)
        until(lambda: not offload(llm).has_more)
        carrier: Any = offload(llm)._carrier

        def is_done() -> bool:
            return bool(carrier._done)

        for waste in (True, False):
            # A reset loses what is left of those that no request has had.
            before = offload(llm).counts.evicted_tokens + 16 * len(offload(llm)._unread)
            assert llm.reset_prefix_cache()
            (sequence,) = llm.start(llm.request(prompts(LENGTHS)[0], GREEDY), lambda _: None)
            llm.engine.scheduler.plan()
            until(is_done)
            loaded = -offload(llm).counts.hit_tokens
            offload(llm).bring(llm.engine._carry_out, step_s=None)
            loaded += offload(llm).counts.hit_tokens
            if waste:
                llm.engine.finish(sequence, "abort")
            while llm.step():
                pass
            for prompt in prompts(LENGTHS)[1:]:  # alone, so that none of these is evicted first
                llm.generate([prompt], GREEDY)
            evicted = offload(llm).counts.evicted_tokens - before
            assert evicted + 16 * len(offload(llm)._unread) == waste * loaded
            assert (evicted > 0) is waste
            assert loaded > 0
        assert offload(llm).counts.late_tokens == 0
        llm.engine.scheduler.check()


def test_what_comes_when_no_request_waits_any_more_is_waste(kept: Kept) -> None:
    with made(kv_tier=("kept:",)) as llm:
        texts(llm, LENGTHS[:1])
        until(lambda: not offload(llm).has_more)
        (tier,) = kept.tiers.values()
        load, entered, go_on = tier.load, threading.Event(), threading.Event()

        def slow(*several: Any) -> int:
            entered.set()
            assert go_on.wait(20)
            return load(*several)

        tier.load = slow  # type: ignore[method-assign]
        assert llm.reset_prefix_cache()
        (sequence,) = llm.start(llm.request(prompts(LENGTHS)[0], GREEDY), lambda _: None)
        llm.engine.scheduler.plan()
        assert entered.wait(20)
        llm.engine.finish(sequence, "abort")
        counts, carrier = offload(llm).counts, cast(Any, offload(llm)._carrier)
        assert (counts.num_late, counts.late_tokens) == (1, 0)
        go_on.set()
        until(lambda: carrier._done)
        offload(llm).bring(llm.engine._carry_out, step_s=None)
        assert (counts.num_late, counts.late_tokens) == (1, 96)
        assert carrier.staging.free_bytes == carrier.staging.capacity_bytes
        tier.load = load  # type: ignore[method-assign]


def test_a_tier_that_cannot_forget_is_named(kept: Kept) -> None:
    """Before anything is forgotten where it never can; and what fails is not loaded from."""

    def unable(*args: Any) -> Tier:
        return FaultyTier(HostMemoryTier(*args), faults=(), share=0.0)

    with kind("unable", Kept(unable)), made(kv_tier=("kept:", "unable:")) as llm:
        texts(llm)
        with pytest.raises(RequestError, match="unable cannot find all records"):
            llm.reset_prefix_cache(reset_external=True)
        assert sum(each.num_cached_tokens for each in llm.generate(prompts(LENGTHS), GREEDY)) > 0
    with made(kv_tier=("kept:", "memory:?size=8MiB")) as llm:
        texts(llm)
        until(lambda: not offload(llm).has_more)
        (tier,) = (each for each in kept.tiers.values())
        failing: Any = tier

        def clear(deadline: Deadline) -> None:
            raise TierError("kept: no route to host")

        own, failing.clear = failing.clear, clear
        with pytest.raises(TierError, match="kept: kept: no route to host"):
            llm.reset_prefix_cache(reset_external=True)
        assert llm.tiers is not None
        assert [tier.state for tier in llm.tiers.tiers] == ["suspect", "ok"]
        found = llm.generate(prompts(LENGTHS), GREEDY)
        assert [each.num_cached_tokens for each in found] == [0] * len(LENGTHS)
        failing.clear = own
        assert llm.reset_prefix_cache(reset_external=True)
        assert llm.tiers.tiers[0].state != "suspect"


# -- begin and end ---------------------------------------------------------------------------------


def test_without_a_second_thread_what_was_opened_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, start = list[str](), threading.Thread.start

    def opened(address: TierAddress, record_bytes: int, namespace: str) -> Tier:
        tier: Any = HostMemoryTier(2**24, record_bytes)
        tier.close = lambda: closed.append(address.kind)
        return tier

    def fail(thread: threading.Thread) -> None:
        if thread.name == "quire-tiers-store":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    said = pytest.raises(ConfigError, match=r"can't start new thread.*ulimit -u")
    with kind("one", opened), kind("two", opened), said:
        made(kv_tier=("one:", "two:"))
    assert sorted(closed) == ["one", "two"]
    assert not [each for each in threading.enumerate() if each.name == "quire-tiers-load"]


def test_a_collector_in_a_thread_of_tiers_waits_for_no_lock_of_theirs(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An LLM that was not closed goes wherever a collector runs: here where its lock is held."""
    monkeypatch.setattr("quire.engine.open_tiers.staging_bytes", lambda *_: 5 * 2**14)
    llm = made(kv_tier=("kept:",))
    carrier: Any = offload(llm)._carrier
    go_on, is_over = threading.Event(), threading.Event()

    def collect() -> None:
        assert go_on.wait(20)
        with carrier.staging._lock:
            gc.collect()
        is_over.set()

    carrier._storing.put(collect)
    texts(llm, LENGTHS[:1])
    assert offload(llm).has_more, "there is nothing for which the lock would be taken"
    cycle: list[Any] = [llm]
    cycle.append(cycle)
    gone = weakref.ref(llm)
    del llm, cycle
    go_on.set()
    assert is_over.wait(20)
    assert gone() is None
    until(lambda: not carrier._storing._thread.is_alive())
    (tier,) = kept.tiers.values()
    assert tier.usage().num_records  # what staging memory held, went out


@pytest.mark.parametrize("cache", ["paged", "virtual"])
def test_memory_for_tiers_is_counted_as_it_is_taken(
    cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a block has more tokens than the option says."""
    monkeypatch.setattr("quire.engine.kv_sizing._LEAST_STAGING_BYTES", 0)
    options: dict[str, Any] = dict(
        kv_cache_dtype="int8_per_token_head", kv_offloading_size="1MiB", max_num_batched_tokens=16
    )
    with made(cache=cache, **options) as llm:
        accounting, carrier = llm.accounting, cast(Any, offload(llm)._carrier)
        assert isinstance(accounting, ExternalBlocks)
        assert (accounting.index.block_size > llm.config.block_size) is (cache == "virtual")
        counted = tier_bytes(llm.config, accounting.groups, llm._kv.memory.page_bytes)
        assert counted == 2**20 + carrier.staging.capacity_bytes


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1"])
def test_what_has_come_from_a_tier_is_not_stored_there_again(name: str, kept: Kept) -> None:
    """In no group: neither of windows nor of states."""
    model = random_model(HYBRIDS[name]()) if name in HYBRIDS else model_of(name)
    with made(model, kv_tier=("kept:",)) as llm:
        texts(llm)
    (tier,) = cast(Any, kept.tiers.values())
    load, store = tier.load, tier.store
    loaded, stored = list[bytes](), list[bytes]()

    def note_load(names: Any, into: Any, deadline: Deadline) -> int:
        count: int = load(names, into, deadline)
        loaded.extend(names[:count])
        return count

    def note_store(names: Any, records: Any, deadline: Deadline) -> int:
        stored.extend(names)
        return int(store(names, records, deadline))

    tier.load, tier.store = note_load, note_store
    with made(model, kv_tier=("kept:",)) as llm:
        texts(llm)
    assert len(loaded) > len(LENGTHS)
    assert not {*loaded} & {*stored}
