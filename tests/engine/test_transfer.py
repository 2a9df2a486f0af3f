"""Two engines that hand blocks to each other: the same texts, whatever the peer does meanwhile."""

import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.test_llm import ids, model_of, prompts
from engine.test_offloading import GREEDY, made, offload, until
from quire import LLM, SamplingParams
from quire.engine.scheduling.offload_policy import OffloadPolicy
from quire.errors import ConfigError, RequestError
from quire.tiers.transfer.peer_frames import FrameKind, pack_count
from quire.tiers.transfer.peer_server import PeerServer

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
LEAVE = {"do_remote_decode": True}
PROMPT = 100  # tokens: six full blocks of 16


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


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    with made() as llm:
        return ids(llm.generate(prompts([PROMPT]), GREEDY))[0]


@pytest.fixture
def where(tmp_path: Path) -> str:
    return f"unix:{tmp_path}/peer"


@pytest.mark.parametrize("way", ["unix", "tcp, sealed", "tcp, trusted"])
def test_a_prompt_is_computed_by_one_and_continued_by_another(
    way: str, where: str, tmp_path: Path, expected: tuple[int, ...]
) -> None:
    options: dict[str, Any] = {}
    if way != "unix":
        with socket.create_server(("127.0.0.1", 0)) as free:
            where = f"tcp://127.0.0.1:{free.getsockname()[1]}"
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


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3"])
def test_windows_and_latents_are_handed_over(name: str, where: str) -> None:
    with made(name) as llm:
        expected = ids(llm.generate(prompts([PROMPT]), GREEDY))[0]
    with producer(where, name) as prefill, consumer(where, name) as decode:
        assert goes_on(decode, left(prefill)) == (expected, 96)


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
        monkeypatch.setattr(PeerServer, "_answer", lambda *_: hold.wait(10))
        params = left(prefill)
        begun_s = time.monotonic()
        assert goes_on(decode, params) == (expected, 0)
        assert time.monotonic() - begun_s < 5
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
        for wrong in ({"do_remote_decode": "yes"}, {"remote_port": True}, {"remote_host": 1}, [1]):
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
