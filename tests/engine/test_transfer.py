"""Two engines that hand blocks to each other: the same texts, whatever the peer does meanwhile."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.covering import in_turn
from engine.test_llm import ids, model_of, prompts
from engine.test_offloading import CACHES, GREEDY, HYBRIDS, made, offload, until
from ports import held_port
from quire import LLM, SamplingParams
from quire.engine.outputs import CompletionOutput
from quire.engine.scheduling.offload_policy import OffloadPolicy
from quire.engine.sequence import Request
from quire.errors import ConfigError, RequestError
from quire.kv import PrefixKeys
from quire.tiers.transfer.peer_frames import FrameKind, pack_count
from quire.tiers.transfer.peer_server import PeerServer
from tiny import random_model

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
LEAVE = {"do_remote_decode": True}
PROMPT = 100  # tokens: six full blocks of 16
LAYOUTS = {**CACHES, "fp8": dict(cache="paged", kv_cache_dtype="fp8")}


def transfer(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "QuireConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def producer(where: str, model: Any = "llama", **options: Any) -> LLM:
    extra = options.pop("extra", {})
    return made(model, kv_transfer_config=transfer("kv_producer", listen=where, **extra), **options)


def consumer(where: str, model: Any = "llama", **options: Any) -> LLM:
    extra = options.pop("extra", {})
    return made(
        model, kv_transfer_config=transfer("kv_consumer", peers=[where], **extra), **options
    )


def left(llm: LLM, length: int = PROMPT) -> dict[str, Any]:
    """What a prefill's answer says."""
    [found] = llm.generate(prompts([length]), ONE, kv_transfer_params=LEAVE)
    assert found.kv_transfer_params is not None
    return dict(found.kv_transfer_params)


def goes_on(
    llm: LLM, params: Mapping[str, Any] | None, length: int = PROMPT
) -> tuple[tuple[int, ...], int]:
    """A decode's tokens, and how many of the prompt's it has not computed."""
    [found] = llm.generate(prompts([length]), GREEDY, kv_transfer_params=params)
    return found.token_ids, found.num_cached_tokens


def run(llm: LLM, requests: Sequence[Request]) -> list[CompletionOutput]:
    return llm._completions(list(requests), None)


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    with made() as llm:
        return ids(llm.generate(prompts([PROMPT]), GREEDY))[0]


@pytest.fixture
def where(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/peer"


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as number:
        yield number


@pytest.mark.parametrize("way", ["unix", "tcp, sealed", "tcp, trusted"])
def test_a_prompt_is_computed_by_one_and_continued_by_another(
    way: str, where: str, port: int, tmp_path: Path, expected: tuple[int, ...]
) -> None:
    options: dict[str, Any] = {}
    if way != "unix":
        where = f"tcp://127.0.0.1:{port}"
    if "sealed" in way:
        (tmp_path / "key").write_bytes(b"k" * 32)
        options = {"kv_tier_key": str(tmp_path / "key")}
    elif "trusted" in way:
        options = {"kv_tier_trusted": True}
    with producer(where, **options) as prefill, consumer(where, **options) as decode:
        params = left(prefill)
        assert params["remote_num_tokens"] == 96
        assert params["remote_block_ids"] == []
        assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
        assert 100 < params["remote_blocks_expiry_time"] - time.time() <= 120
        records = offload(prefill)._carrier._transfer.records  # type: ignore[attr-defined]
        assert goes_on(decode, {**params, "tp_size": 1}) == (expected, 96)
        assert offload(decode).counts.hit_tokens == 96
        assert decode.tiers is not None
        [peer] = decode.tiers.tiers
        assert (peer.hit_tokens, peer.state, peer.is_shared) == (96, "ok", True)
        until(lambda: records.is_empty)  # released
        records.check()
        decode.engine.scheduler.check()
        assert goes_on(decode, params) == (expected, 96), "by now it has them itself"


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("options", "name"),
    in_turn(LAYOUTS, ["gemma3", "deepseek_v3", "lfm2", "falcon_h1", "qwen3_next", "llama"]),
)
def test_windows_latents_states_and_bytes_are_handed_over(
    options: str, name: str, where: str
) -> None:
    model, own = name, LAYOUTS[options]
    if name in HYBRIDS:
        model, own = random_model(HYBRIDS[name]()), {**own, "kv_cache_dtype": "auto"}
    with made(model, **own) as llm:
        expected = ids(llm.generate(prompts([PROMPT]), GREEDY))[0]
    with producer(where, model, **own) as prefill, consumer(where, model, **own) as decode:
        params = left(prefill)
        assert goes_on(decode, params) == (expected, params["remote_num_tokens"])
        assert params["remote_num_tokens"] >= 64, "some layouts have blocks of 32 tokens"
        decode.engine.scheduler.check()


def test_ends_that_keep_other_bytes_compute(
    where: str, expected: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with producer(where, cache="paged") as prefill:
        params = left(prefill)
        with consumer(where, cache="virtual") as decode:
            assert goes_on(decode, params) == (expected, 0)
        assert "its records are of another fingerprint" in caplog.text
        with consumer(where, cache="paged", kv_cache_dtype="fp8") as decode:
            found, cached = goes_on(decode, params)
            assert cached == 0
            decode.reset_prefix_cache()
            assert goes_on(decode, None) == (found, 0)
        assert "another fingerprint" in caplog.text
        with consumer(where, cache="paged") as decode:
            assert goes_on(decode, params) == (expected, 96), "nothing was lost meanwhile"


def test_a_tenant_gets_no_blocks_of_another(where: str, expected: tuple[int, ...]) -> None:
    """Who has a lease's name gets what its own salt, tenant and adapter name, and no more."""
    [prompt] = prompts([PROMPT])
    own = PrefixKeys(tenant="a", salt="b")
    with producer(where) as prefill, consumer(where) as decode:
        for keys, cached in (
            (PrefixKeys(), 0),
            (PrefixKeys(tenant="b", salt="a"), 0),
            (PrefixKeys(salt="b"), 0),
            (PrefixKeys(tenant="a"), 0),
            (PrefixKeys(tenant="a", salt="b", lora="c" * 64), 0),
            (own, 96),
        ):  # each of them ends the lease that it names
            request = prefill.request(prompt, ONE, keys=own, kv_transfer_params=LEAVE)
            [found] = run(prefill, [request])
            params = found.kv_transfer_params
            assert params is not None
            request = decode.request(prompt, GREEDY, keys=keys, kv_transfer_params=params)
            [got] = run(decode, [request])
            assert (got.token_ids, got.num_cached_tokens) == (expected, cached)


def test_choices_and_several_prompts_share_what_is_left(where: str) -> None:
    """One lease a request, whatever its choices; a stop string; and little memory besides."""
    several = prompts([PROMPT, 75, PROMPT])
    three = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, n=3)
    with made() as llm:
        expected = ids(llm.generate(several, GREEDY))
    with producer(where) as prefill, consumer(where, kv_cache_memory_bytes=220_000) as decode:
        records: Any = offload(prefill)._carrier._transfer.records  # type: ignore[attr-defined]
        found = prefill.generate(several, replace(three, max_tokens=1), kv_transfer_params=LEAVE)
        until(lambda: not records._reserved_bytes)
        assert len(records._leases) == 3
        assert records.usage().num_records == 6 + 4, "of two prompts that are one"
        params = [each.kv_transfer_params for each in found]
        requests = [
            decode.request(prompt, three, kv_transfer_params=own)
            for prompt, own in zip(several, params, strict=True)
        ]
        got = run(decode, requests)
        assert [[choice.token_ids for choice in each.choices] for each in got] == [
            [own] * 3 for own in expected
        ]
        until(lambda: records.is_empty)
        records.check()
        decode.engine.scheduler.check()


def test_a_request_that_is_abandoned_while_it_waits_ends_its_lease(
    where: str, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = threading.Event()
    answer = PeerServer._await
    with producer(where) as prefill, consumer(where) as decode:
        records: Any = offload(prefill)._carrier._transfer.records  # type: ignore[attr-defined]
        params = left(prefill)

        def late(*args: Any) -> None:
            hold.wait(10)
            answer(*args)

        monkeypatch.setattr(PeerServer, "_await", late)
        [prompt] = prompts([PROMPT])
        other = decode.start(decode.request(prompts([20])[0], GREEDY), lambda _: None)
        decode.step()  # so that no step waits for a peer
        request = decode.request(prompt, GREEDY, kv_transfer_params=params)
        started = decode.start(request, lambda _: None)
        decode.step()
        assert offload(decode)._jobs
        decode.abandon([*started, *other])
        hold.set()
        until(lambda: records.is_empty)
        assert goes_on(decode, params) == (expected, 0), "the lease has ended with it"
        request = decode.request(prompt, GREEDY, kv_transfer_params=left(prefill))
        decode.abandon(decode.start(request, lambda _: None))  # before it has asked for anything
        until(lambda: records.is_empty)
        decode.engine.scheduler.check()


def test_a_reset_and_a_sleep_between_the_two_requests(
    where: str, expected: tuple[int, ...]
) -> None:
    """What is not copied out yet is lost with the cache, and no end waits for it."""
    with producer(where) as prefill, consumer(where) as decode:
        carrier: Any = offload(prefill)._carrier
        records, room = carrier._transfer.records, carrier.staging.capacity_bytes
        carrier.staging.capacity_bytes = 0
        params = left(prefill)
        assert prefill.reset_prefix_cache()
        carrier.staging.capacity_bytes = room
        offload(prefill).store(step_s=None)
        assert not records._reserved_bytes, "so that no peer waits for it"
        assert goes_on(decode, params) == (expected, 0)
        until(lambda: not records._leases)

        decode.reset_prefix_cache()
        params = left(prefill)
        until(lambda: not records._reserved_bytes)
        assert prefill.sleep()
        assert decode.sleep()
        decode.wake_up()
        assert goes_on(decode, params) == (expected, 96), "leased records are in host memory"
        prefill.wake_up()
        decode.reset_prefix_cache()
        assert goes_on(decode, left(prefill)) == (expected, 96)
        prefill_params = left(prefill)
        assert prefill.reset_prefix_cache(reset_external=True), "which ends leases, too"
        decode.reset_prefix_cache()
        assert goes_on(decode, prefill_params) == (expected, 0)


def test_a_server_that_was_started_anew_has_no_old_leases(
    where: str, expected: tuple[int, ...]
) -> None:
    with producer(where) as prefill:
        params = left(prefill)
    with consumer(where) as decode, producer(where) as prefill:
        assert goes_on(decode, params) == (expected, 0)
        decode.reset_prefix_cache()
        assert goes_on(decode, left(prefill)) == (expected, 96)


def test_no_peer_is_to_blame_for_a_job_that_came_late(
    where: str, expected: tuple[int, ...]
) -> None:
    with producer(where) as prefill, consumer(where) as decode:
        carrier: Any = offload(decode)._carrier
        load = carrier.load
        carrier.load = lambda job, _: load(job, 0.0)
        assert goes_on(decode, left(prefill)) == (expected, 0)
        [peer] = carrier._transfer.tiers
        assert peer.may_load
        assert not peer.counted().num_errors


def test_a_peer_that_hangs_with_releases_is_left_alone(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that is out of time is a failure of the peer: the next ones do not wait for it."""
    monkeypatch.setattr("quire.engine.transfer._RELEASE_S", 0.05)
    monkeypatch.setattr("quire.tiers.guard._PATIENCE_S", 0.05)
    with producer(where) as prefill, consumer(where) as decode:
        params, hold = left(prefill), threading.Event()
        answer = PeerServer._answer

        def hang(server: Any, connection: Any, frame: Any, deadline: Any) -> None:
            if frame.kind == FrameKind.RELEASE:
                hold.wait(10)
            answer(server, connection, frame, deadline)

        monkeypatch.setattr(PeerServer, "_answer", hang)
        assert goes_on(decode, params)[1] == 96
        [peer] = offload(decode)._carrier._transfer.tiers  # type: ignore[attr-defined]
        until(lambda: peer.counted().num_errors["drop"] == 1)
        assert not peer.may_load
        hold.set()


def test_what_goes_wrong_is_computed(
    where: str, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A lease that has ended, one that was for less, a record that is wrong, an unknown peer."""
    with producer(where) as prefill, consumer(where) as decode:
        carrier: Any = offload(prefill)._carrier
        params = left(prefill)

        def begun_anew() -> tuple[tuple[int, ...], int]:
            decode.reset_prefix_cache()
            return goes_on(decode, params)

        elsewhere = {**params, "remote_host": "unix:/elsewhere"}
        assert goes_on(decode, elsewhere) == (expected, 0)
        assert "none of peers" in caplog.text
        decode.reset_prefix_cache()
        assert goes_on(decode, {**params, "remote_host": "a b"}) == (expected, 0)
        carrier._transfer.records.release(params["remote_request_id"])
        assert begun_anew() == (expected, 0)
        params = left(prefill)
        assert begun_anew() == (expected, 96)

        records = carrier._transfer.records
        take = records.take

        def lie(names: Any) -> list[memoryview]:
            found = [bytearray(each) for each in take(names)]
            for each in found[2:3]:
                each[-1] ^= 1
            return [memoryview(each) for each in found]

        monkeypatch.setattr(records, "take", lie)
        params = left(prefill)
        assert begun_anew() == (expected, 32)
        assert "a record is not what was stored (checksum)" in caplog.text
        monkeypatch.undo()

        records.size_bytes = records.usage().used_bytes + 2 * carrier.staging.sizes[0]
        records.release_all()
        params = left(prefill)
        assert params["remote_num_tokens"] < 96
        assert begun_anew() == (expected, params["remote_num_tokens"])
        records.release_all()
        records.size_bytes = 1
        [found] = prefill.generate(prompts([PROMPT]), ONE, kv_transfer_params=LEAVE)
        assert found.kv_transfer_params is None
        records.check()


def test_a_peer_that_is_another_model_dies_or_hangs_costs_no_more_than_computing(
    where: str, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr("quire.engine.scheduling.offload_policy._LONGEST_WAIT_S", 0.5)
    with consumer(where) as decode:
        with producer(where, block_size=32) as other:
            params = left(other)
            assert goes_on(decode, params) == (expected, 0)
            assert "another fingerprint" in caplog.text
        decode.reset_prefix_cache()
        assert goes_on(decode, params) == (expected, 0), "it is away"
    with producer(where) as prefill, consumer(where) as decode:
        hold = threading.Event()
        monkeypatch.setattr(PeerServer, "_answer", lambda *_: hold.wait(60))
        params = left(prefill)
        begun_s = time.monotonic()
        assert goes_on(decode, params) == (expected, 0)
        assert time.monotonic() - begun_s < 30
        hold.set()

        def hang_up(_: Any, connection: Any, *__: Any) -> None:
            connection.send(FrameKind.ANSWER, pack_count(9), __[-1])
            connection.close()

        monkeypatch.setattr(PeerServer, "_answer", hang_up)
        for tier in offload(decode)._carrier._transfer.peers.values():  # type: ignore[attr-defined]
            tier._reads._break_s = 0.0
        decode.reset_prefix_cache()
        assert goes_on(decode, params) == (expected, 0)


def test_offers_wait_for_room_in_staging_and_a_peer_for_them(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks than staging memory holds: all of them arrive, some after the answer."""
    with producer(where) as prefill, consumer(where) as decode:
        carrier: Any = offload(prefill)._carrier
        carrier.staging.capacity_bytes = 4 * carrier.staging.sizes[0]
        params = left(prefill, 120)
        assert params["remote_num_tokens"] == 112
        assert goes_on(decode, params, 120)[1] == 112


def test_a_request_waits_for_blocks_that_are_slower_than_computing(
    where: str, expected: tuple[int, ...]
) -> None:
    """As long as ``wait_s`` says, whether it names the peer or finds what that has left."""
    for wait_s, cached in ((0, 0), (60, 96)):
        with producer(where) as prefill, consumer(where, extra={"wait_s": wait_s}) as decode:
            offload(decode)._costs.recompute_s = lambda _: 1e-9  # type: ignore[method-assign]
            offload(decode)._carrier.load_s = lambda _: 1.0  # type: ignore[method-assign]
            assert goes_on(decode, left(prefill)) == (expected, cached)
        with producer(where, extra={"wait_s": wait_s}) as heir:
            with consumer(where, extra={"drain_to": where}) as old:
                assert goes_on(old, None) == (expected, 0)
                assert old.store_hottest(20.0) >= 6
            offload(heir)._costs.recompute_s = lambda _: 1e-9  # type: ignore[method-assign]
            offload(heir)._carrier.load_s = lambda _: 1.0  # type: ignore[method-assign]
            assert goes_on(heir, None) == (expected, cached)


def test_a_peer_is_asked_again_for_what_it_still_copies_out(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of a lease comes at the third question; one that has ended is asked for once."""
    monkeypatch.setattr("quire.engine.transfer.LONGEST_AWAIT_S", 0.05)
    answer, asked = PeerServer._await, list[int]()
    with producer(where) as prefill, consumer(where, extra={"wait_s": 60}) as decode:
        carrier: Any = offload(prefill)._carrier
        room, carrier.staging.capacity_bytes = carrier.staging.capacity_bytes, 0

        def count(*args: Any) -> None:
            asked.append(1)
            if len(asked) == 3:
                carrier.staging.capacity_bytes = room
            answer(*args)

        monkeypatch.setattr(PeerServer, "_await", count)
        params = left(prefill)
        assert goes_on(decode, params)[1] == 96
        assert len(asked) >= 3
        until(lambda: carrier._transfer.records.is_empty)
        asked.clear()
        decode.reset_prefix_cache()
        assert goes_on(decode, params)[1] == 0
        assert len(asked) == 1


def test_other_weights_end_all_leases(where: str) -> None:
    with producer(where) as prefill:
        left(prefill)
        records: Any = offload(prefill)._carrier._transfer.records  # type: ignore[attr-defined]
        offload(prefill).stop("the weights are not what they were")
        assert records.is_empty
        [found] = prefill.generate(prompts([PROMPT]), ONE, kv_transfer_params=LEAVE)
        assert found.kv_transfer_params is None


def test_records_of_a_broken_model_are_not_given_away(where: str) -> None:
    """The prompt was offered with its first token; the second one's logits are no numbers."""
    with producer(where) as prefill:
        sampler: Any = prefill.engine._sampler
        sample, steps = sampler.sample, []

        def broken(logits: torch.Tensor, plan: Any) -> Any:
            steps.append(plan)
            return sample(torch.full_like(logits, torch.nan) if len(steps) > 2 else logits, plan)

        sampler.sample = broken
        [found] = prefill.generate(prompts([PROMPT]), GREEDY, kv_transfer_params=LEAVE)
        assert found.finish_reason == "error"
        records: Any = offload(prefill)._carrier._transfer.records  # type: ignore[attr-defined]
        until(lambda: records.is_empty)


def test_without_a_config_the_params_have_no_effect_and_wrong_types_are_refused() -> None:
    with LLM(model_of("llama"), max_model_len=128, kv_cache_memory_bytes="4MiB") as llm:
        [found] = llm.generate(prompts([40]), ONE, kv_transfer_params=LEAVE)
        assert found.kv_transfer_params is None
        most = {"do_remote_prefill": True, "remote_host": "a"}
        for wrong in ({"do_remote_decode": "yes"}, {"remote_port": True}, {"remote_host": 1}, [1],
                      {"do_remote_decode": 10**5000}, {**most, "remote_port": 10**5000},
                      {**most, "remote_port": -1}, {**most, "remote_port": 65_536},
                      {**most, "remote_host": "a" * 257}, {**most, "remote_request_id": "a" * 65},
                      {**most, "remote_request_id": "\u00e9"}):  # fmt: skip
            with pytest.raises(RequestError, match="kv_transfer_params"):
                llm.generate(prompts([40]), ONE, kv_transfer_params=wrong)  # type: ignore[arg-type]


def test_a_path_that_cannot_be_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be bound"):
        producer(f"unix:{tmp_path}/none/peer")


def test_an_engine_that_stops_leaves_its_hottest_blocks_to_a_peer_and_in_a_folder(
    where: str, tmp_path: Path, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it has stored nothing before; what is read from the peer is in its own memory."""
    folder = f"file:{tmp_path}/folder?size=1GiB&reserve=0"
    with producer(where) as heir:
        last = transfer("kv_consumer", peers=[where], drain_to=where)
        with made(kv_transfer_config=last, kv_tier=(folder,), kv_tier_write="never") as reader:
            assert offload(reader)._carrier._lasting == tuple(  # type: ignore[attr-defined]
                offload(reader)._carrier._transfer.peers.values()  # type: ignore[attr-defined]
            )
        monkeypatch.setattr(OffloadPolicy, "store", lambda *_, **__: None)
        monkeypatch.setattr("quire.engine.scheduling.offload_policy._CLOSE_S", 0.1)  # in vain
        with made(kv_transfer_config=last, kv_tier=(folder,)) as old:
            goes_on(old, None)
            old.generate(prompts([50]), ONE)
            assert old.store_hottest(20.0) >= 6
        assert old.store_hottest(1.0) == 0
        monkeypatch.undo()
        assert goes_on(heir, None) == (expected, 96)
    with made(kv_tier=(folder,)) as new:
        assert goes_on(new, None) == (expected, 96)


def test_a_drain_ends_with_its_time_and_parents_go_first(tmp_path: Path) -> None:
    with made(kv_tier=(f"file:{tmp_path}?size=1GiB&reserve=0",)) as llm:
        llm.generate(prompts([100, 75]), ONE)
        nodes = llm.accounting.hottest_nodes()  # type: ignore[attr-defined]
        index = llm.accounting.index  # type: ignore[attr-defined]
        assert len(nodes) == len(set(nodes)) >= 10
        roots = {index.parent(node) for node in nodes} - set(nodes)
        for at, node in enumerate(nodes):
            assert index.parent(node) in roots | set(nodes[:at])
        assert llm.store_hottest(0.0) == 1
