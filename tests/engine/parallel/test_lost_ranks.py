"""What one rank cannot do, none can; and who is gone, or alone, is said at once: nothing hangs."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BloomConfig,
    BloomForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from conformance.covering import only
from engine.parallel.ranks import GREEDY, OPTIONS, PROMPTS, Folder, gone, texts
from quire.engine.async_llm import AsyncLLM
from quire.engine.llm import LLM
from quire.engine.parallel import process_group as group
from quire.engine.parallel import worker as child
from quire.engine.parallel.messages import Answer, Call, Done, Failed
from quire.engine.parallel.model_part import PartedModel, load_parts
from quire.engine.parallel.worker_group import WorkerGroup, _Member
from quire.errors import ConfigError, MemoryUnavailable, ModelNotLoadable, RankLost, RequestError
from quire.memory.cuda.driver import DriverError
from quire.memory.machine import DeviceMemory, read_machine
from quire.models.loader import LoadedModel, load
from tiny import VOCAB, tiny_model

on_the_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="ranks would be placed on the GPU"
)
pytestmark = pytest.mark.filterwarnings("ignore")  # of Transformers, about plans and RoPE

EXPECT = Call("expect", (1, 16))


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, None)


# -- one accounting, and a rank that is refused pages --


class ToldCrew:
    """No processes: it says what another rank would have answered."""

    num_ranks, device_type, lost = 2, "cpu", None

    def __init__(self, refuses: Callable[[int], bool]) -> None:
        self.refuses, self.messages = refuses, list[Call]()
        self.committed = self.more_bytes = self.num_applied = self.lost_at = 0

    def new_name(self) -> int:
        return 1 + len(self.messages)

    def required(self, message: Call, own: Callable[[], Any]) -> Any:
        return self.all_of(message, own)[0]

    def all_of(self, message: Call, own: Callable[[], Any]) -> tuple[Any, list[Answer]]:
        self.messages.append(message)
        value = own()
        self.num_applied += message.method == "apply"
        if 0 < self.lost_at <= self.num_applied:
            raise RankLost("rank 1 (process 7) was ended by SIGKILL")
        if message.method != "apply":
            return value, [Done()]
        if self.refuses(self.num_applied):
            return value, [Failed(MemoryUnavailable("rank 1: no pages"), self.committed)]
        self.committed = value + self.more_bytes
        return value, [Done(self.committed)]

    def try_tell(self, message: Call) -> None:
        self.messages.append(message)


def with_other_rank(folder: Path, refuses: Callable[[int], bool]) -> LoadedModel:
    """A whole model that believes that another rank has a part of it."""
    crew: Any = ToldCrew(refuses)
    return replace(load(folder), ranks=PartedModel(crew, 1, owns_workers=False))


@pytest.mark.parametrize(
    "cache", only(["contiguous", "growing", "paged", "virtual"], "growing", "paged")
)
def test_pages_that_one_rank_is_refused_are_refused_to_all(folder: Folder, cache: str) -> None:
    """The others have them already: all begin anew, in what the poorest of them has."""
    options = dict(OPTIONS, cache=cache)
    with folder.alone("llama", cache=cache) as llm:
        expected = texts(llm.generate(PROMPTS, GREEDY))
    refused_at = 5
    loaded = with_other_rank(folder.of("llama"), lambda number: number == refused_at)
    with LLM(loaded, tensor_parallel_size=2, **options) as llm:
        crew: Any = loaded.ranks.workers
        assert texts(llm.generate(PROMPTS, GREEDY)) == expected
        assert crew.num_applied > refused_at
        makings = [m for m in crew.messages if m.method == "make_storage"]
        assert len(makings) == 2, "once, and once more in an empty cache"


def test_ranks_that_differ_are_an_error(folder: Folder) -> None:
    loaded = with_other_rank(folder.of("llama"), lambda _: False)
    crew: Any = loaded.ranks.workers
    crew.more_bytes = 4096
    with pytest.raises(RuntimeError, match=r"the ranks have committed .* bytes for the same"):
        LLM(loaded, tensor_parallel_size=2, **OPTIONS)


class RefusingCrew(ToldCrew):
    """The other rank does not do what messages of one kind say."""

    def __init__(self, kind: str) -> None:
        super().__init__(lambda _: False)
        self.kind = kind

    def required(self, message: Call, own: Callable[[], Any]) -> Any:
        value, answers = self.all_of(message, own)
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer.error
        return value

    def all_of(self, message: Call, own: Callable[[], Any]) -> tuple[Any, list[Answer]]:
        value, answers = super().all_of(message, own)
        if message.method == self.kind:
            answers = [Failed(MemoryUnavailable("rank 1: no room"))]
        return value, answers


def test_what_one_rank_refuses_is_held_by_none(folder: Folder) -> None:
    crew: Any = RefusingCrew("assemble")
    loaded = replace(load(folder.of("llama")), ranks=PartedModel(crew, 1, owns_workers=False))
    with pytest.raises(MemoryUnavailable, match="rank 1: no room"):
        LLM(loaded, tensor_parallel_size=2, **OPTIONS)
    made, undone = crew.messages
    assert made.method == "assemble"
    assert undone == Call("disassemble", made.args[:1])

    crew = RefusingCrew("prefault")
    loaded = replace(loaded, ranks=PartedModel(crew, 1, owns_workers=False))
    with pytest.raises(MemoryUnavailable, match="rank 1: no room"):
        LLM(loaded, tensor_parallel_size=2, **OPTIONS, residency="prefault")
    assert crew.messages[-1].method == "disassemble"
    assert [each.method for each in crew.messages].count("close_storage") == 1

    crew = RefusingCrew("load")
    crew.all_of = lambda message, _: (crew.messages.append(message), [Failed(OSError("gone"))])
    with pytest.raises(OSError, match="gone"):
        load_parts(folder.of("llama"), 2, workers=crew)
    asked, undone = crew.messages
    assert asked.method == "load"
    assert undone == Call("unload", asked.args[:1])


def test_a_rank_that_does_not_say_what_it_has_is_an_error() -> None:
    crew: Any = RefusingCrew("read_device")
    device = DeviceMemory(name="fake", total_bytes=2, free_bytes=1)
    with pytest.raises(MemoryUnavailable, match="rank 1: no room"):
        PartedModel(crew, 1, owns_workers=False).share_of(read_machine(device=device))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DriverError("cuMemMap", "CUDA_ERROR_UNKNOWN"), DriverError),
        (ConfigError("no such option"), ConfigError),
        (KeyError(7), RuntimeError),
    ],
)
def test_whatever_a_rank_raises_arrives(error: Exception, kind: type[Exception]) -> None:
    def fail(*_: object) -> None:
        raise error

    follower: Any = SimpleNamespace(rank=1, apply=fail, committed_bytes=lambda _: 5)
    answer = pickle.loads(pickle.dumps(child._answer(follower, Call("apply", (1, ())))))
    assert isinstance(answer, Failed)
    assert type(answer.error) is kind
    assert str(error) in str(answer.error)
    assert answer.value == 5


@pytest.mark.parametrize("where", ["send_bytes", "own", "poll", "recv_bytes"])
def test_after_an_interrupt_no_answer_is_taken_for_the_next_ones(where: str) -> None:
    """Else the answer that was not waited for would be read as that to another message."""

    def call(name: str) -> Any:
        if name == where:
            raise KeyboardInterrupt
        return pickle.dumps(Done()) if name == "recv_bytes" else True

    names = "send_bytes", "poll", "recv_bytes"
    channel = SimpleNamespace(**{name: lambda *_, name=name: call(name) for name in names})
    killed: list[bool] = []
    process = SimpleNamespace(pid=7, kill=lambda: killed.append(True))
    crew = WorkerGroup(2)
    crew._members.append(_Member(1, process, channel))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        crew.required(Call("read_device", (1,)), lambda: call("own"))
    assert killed
    with pytest.raises(RankLost, match="interrupted in the middle of a step"):
        crew.required(Call("read_device", (1,)), bool)


@pytest.mark.parametrize(("message", "patient"), [(Call("prefault", (1,)), True), (EXPECT, False)])
def test_who_exchanges_nothing_is_waited_for_however_long_it_takes(
    message: Call, patient: bool
) -> None:
    """Rank 0 has failed; the other is still about it, and ends by itself."""
    waited: list[float] = []
    channel = SimpleNamespace(
        send_bytes=lambda _: None,
        poll=lambda timeout_s: waited.append(timeout_s) or True,
        recv_bytes=lambda: pickle.dumps(Done()),
    )
    crew = WorkerGroup(2, grace_s=7.0)
    crew._members.append(_Member(1, SimpleNamespace(pid=7), channel))  # type: ignore[arg-type]

    def fail() -> None:
        raise MemoryUnavailable("only here")

    with pytest.raises(MemoryUnavailable, match="only here"):
        crew.required(message, fail)
    assert [timeout_s > 7.0 for timeout_s in waited] == [patient]


def test_who_does_not_answer_where_rank_0_has_failed_is_ended() -> None:
    channel = SimpleNamespace(send_bytes=lambda _: None, poll=lambda _: False)
    killed: list[bool] = []
    process = SimpleNamespace(pid=7, kill=lambda: killed.append(True), poll=lambda: None)
    crew = WorkerGroup(2, grace_s=7.0)
    crew._members.append(_Member(1, process, channel))  # type: ignore[arg-type]

    def fail() -> None:
        raise ValueError("only here")

    with pytest.raises(RankLost, match=r"rank 1 .* has not answered"):
        crew.required(EXPECT, fail)
    assert killed
    with pytest.raises(RankLost):
        crew.required(EXPECT, fail)


# -- ranks that are gone --


def test_all_readers_hear_of_a_rank_that_is_lost(folder: Folder) -> None:
    loaded = with_other_rank(folder.of("llama"), lambda _: False)
    crew: Any = loaded.ranks.workers

    async def read() -> list[Any]:
        async with AsyncLLM(loaded, tensor_parallel_size=2, **OPTIONS) as llm:
            crew.lost_at = crew.num_applied + 3
            asked = [llm.complete(prompt, GREEDY) for prompt in PROMPTS]
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert isinstance(llm.failure, RankLost)
            with pytest.raises(RankLost):
                await llm.complete(PROMPTS[0], GREEDY)
            return found

    found = asyncio.run(read())
    assert [type(each) for each in found] == [RankLost] * len(PROMPTS)
    assert "rank 1 (process 7)" in str(found[0])


@on_the_cpu
def test_a_rank_that_is_killed_ends_the_llm_with_its_name(folder: Folder) -> None:
    pytest.importorskip("accelerate")
    llm = LLM(folder.of("llama"), tensor_parallel_size=2, **OPTIONS)
    assert llm._ranks is not None
    (pid,) = llm._ranks.workers.pids
    steps = 0

    def kill(_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(RankLost, match=rf"rank 1 \(process {pid}\) was ended by SIGKILL"):
        llm.generate(PROMPTS, GREEDY, observe=kill)
    assert llm.is_closed
    assert not torch.distributed.is_initialized()
    assert llm.memory.committed_bytes == 0
    with pytest.raises(RequestError, match="closed"):
        llm.generate(PROMPTS, GREEDY)
    llm.close()


@on_the_cpu
@pytest.mark.full
def test_who_fails_alone_is_not_waited_for(folder: Folder) -> None:
    """Rank 0 fails while the other waits for it in an exchange; then the other way round."""
    pytest.importorskip("accelerate")

    def fail() -> None:
        raise ValueError("only here")

    crew = WorkerGroup(2, grace_s=1.0).start()
    folder.crew, pids = crew, crew.pids
    try:
        with folder.ranked("llama") as llm:
            engine = llm._team._engine  # type: ignore[union-attr]
            with pytest.raises(RankLost, match=r"rank 1 .* has not answered"):
                crew.required(Call("expect", (engine, 16)), fail)
            with pytest.raises(RankLost):
                crew.required(Call("expect", (engine, 16)), fail)
    finally:
        crew.close()
    assert gone(pids)

    crew = WorkerGroup(2, grace_s=1.0).start()
    try:
        unknown = Call("expect", (10**6, 16))
        with pytest.raises(RankLost, match=r"it had failed: rank 1: KeyError\(1000000\)"):
            crew.required(unknown, lambda: torch.distributed.all_reduce(torch.zeros(1)))
        with pytest.raises(RankLost, match="exit code 70"):
            crew.required(unknown, fail)
    finally:
        crew.close()
    assert not torch.distributed.is_initialized()


# -- what is not cut into parts --


def refused(model: Any, size: int = 2, **options: Any) -> str:
    with pytest.raises(ConfigError) as found:
        LLM(model, tensor_parallel_size=size, **{**OPTIONS, **options})
    assert not torch.distributed.is_initialized(), "nothing was started"
    return str(found.value)


def test_what_cannot_be_cut_is_said_before_anything_is_started(folder: Folder) -> None:
    llama = folder.of("llama")
    assert "a model in memory cannot be divided" in refused(tiny_model("llama"))
    assert "was loaded in 1 part" in refused(load(llama))
    assert "does not divide the 2 heads" in refused(llama, size=3)
    assert "make it one of 1, 2" in refused(llama, size=4)
    bloom = BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2)
    BloomForCausalLM(bloom).save_pretrained(folder.path / "bloom")
    assert "no tensor-parallel plan" in refused(folder.path / "bloom")
    assert "quantization=int8" in refused(llama, quantization="int8")
    draft = {"model": str(llama), "num_speculative_tokens": 2}
    assert "a draft model would lie in rank 0 alone" in refused(llama, speculative_config=draft)
    assert "provider=" in refused(llama, provider=object())
    assert "must be from 1 to 1,024" in refused(llama, size=0)


def test_without_accelerate_the_extra_is_named(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "find_spec", lambda _: None)
    assert "pip install 'quire-kv[tp]'" in refused(folder.of("llama"))


def test_devices_are_the_ranks_own(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "find_spec", lambda _: True)
    llama = folder.of("llama")
    assert "device=cuda:1 is one device" in refused(llama, device="cuda:1")
    assert "built without CUDA" in refused(llama, device="cuda") or torch.version.cuda
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "hide them (CUDA_VISIBLE_DEVICES=)" in refused(llama, device="cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="more than the 1 CUDA devices here"):
        WorkerGroup(2, "cuda").start()


def test_states_and_sources_run_in_one_process(folder: Folder) -> None:
    mamba = MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    MambaForCausalLM(mamba).save_pretrained(folder.path / "mamba")
    assert "keep recurrent states" in refused(folder.path / "mamba")
    sizes = dict(d_model=32, encoder_layers=1, decoder_layers=1, max_position_embeddings=128)
    heads = dict(encoder_attention_heads=2, decoder_attention_heads=2)
    ffn = dict(encoder_ffn_dim=32, decoder_ffn_dim=32)
    bart = BartConfig(vocab_size=VOCAB, **sizes, **heads, **ffn)  # type: ignore[arg-type]
    BartForConditionalGeneration(bart).save_pretrained(folder.path / "bart")
    assert "reads a source" in refused(folder.path / "bart")


def test_a_folder_that_is_not_there_is_named_before_anything_is_started() -> None:
    with pytest.raises(ModelNotLoadable, match="/nowhere/at/all"):
        LLM("/nowhere/at/all", tensor_parallel_size=2)
