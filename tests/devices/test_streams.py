"""One order for all of an engine's work: the default stream, whatever the caller's is."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import pretend
from pretend import Gpu, PretendMemory
from quire import LLM, SamplingParams
from quire.devices import on_default_stream
from quire.engine.cache_lock import CacheLock
from quire.engine.runner import ModelRunner
from quire.kv.storage.per_layer import BlockStorage
from quire.kv.storage.stacked import CopyStream
from quire.memory import by_device
from tiny import tiny_model, tokens

DEVICE = torch.device("cuda", 0)


class Stream:
    """One that notes for whom it has waited."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited_for: list[str] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for.append(other.name)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self  # its events, too


class Streams(threading.local):
    """Each thread has its own current one."""

    default = Stream("default")

    def __init__(self) -> None:
        self.current = self.default

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    with pretend.cuda() as gpu:
        found = Streams()
        found.default.waited_for.clear()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: found.current)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda *_: found.default)
        monkeypatch.setattr(torch.cuda, "stream", found.on)
        monkeypatch.setattr(Streams, "gpu", gpu, raising=False)
        yield found


def test_what_the_caller_launched_comes_before_and_after(streams: Streams) -> None:
    own = Stream("own")
    with streams.on(own):
        with on_default_stream(DEVICE):
            assert streams.current is streams.default
            assert streams.default.waited_for == ["own"]
            with on_default_stream(DEVICE):  # again
                assert streams.default.waited_for == ["own"]
        assert streams.current is own
    assert own.waited_for == ["default"]
    with on_default_stream(torch.device("cpu")):
        assert streams.default.waited_for == ["own"]


def test_another_device_is_the_current_one_before_its_stream_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch's streams end on the device that was current, where they take a context."""
    current: list[int] = []

    @contextmanager
    def stream(_: object) -> Iterator[None]:
        current.append(torch.cuda.current_device())
        yield
        current.append(torch.cuda.current_device())

    with pretend.cuda(num_devices=2):
        monkeypatch.setattr(torch.cuda, "stream", stream)
        with on_default_stream(torch.device("cuda", 1)):
            pass
        copies = CopyStream(torch.device("cuda", 1))
        copies.run("a layer", lambda: None)
        assert torch.cuda.current_device() == 0
        monkeypatch.undo()
    assert current == [1, 1, 1, 1]


def on_a_thread(do: Callable[[], object]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_memory_and_steps_go_by_one_stream(
    elsewhere: bool, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made on one of the caller's, used on another, or on another thread."""
    gpu: Gpu = Streams.gpu  # type: ignore[attr-defined]
    seen: list[tuple[str, Stream]] = []

    def memory_for(*_: object) -> PretendMemory:
        seen.append(("memory", streams.current))
        return PretendMemory(gpu)

    def noted(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((name, streams.current))
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    monkeypatch.setattr(by_device, "memory_for", memory_for)
    noted(ModelRunner, "run")
    noted(BlockStorage, "apply")
    options: dict[str, Any] = dict(attention_backend="sdpa", max_model_len=64, max_num_seqs=2)
    with streams.on(Stream("one")):
        llm = LLM(tiny_model("llama").to("cuda"), **options, kv_cache_memory_bytes="1MiB")
    prompt = tokens(1, 9)[0].tolist()

    def use() -> None:
        with streams.on(Stream("another")):
            llm.generate([prompt], SamplingParams(max_tokens=3))
            started = llm.start(llm.request(prompt), lambda _: None)
            llm.abandon(started)
            llm.reset_prefix_cache()
            llm.resize(2**19)
            llm.close()

    on_a_thread(use) if elsewhere else use()
    assert {what for what, _ in seen} == {"memory", "run", "apply"}
    assert {stream.name for _, stream in seen} == {"default"}
    assert streams.current is streams.default


def test_a_lock_whose_stream_cannot_be_had_is_free_again() -> None:
    fails = [True]

    @contextmanager
    def around() -> Iterator[None]:
        if fails:
            raise RuntimeError("CUDA error")
        yield

    lock = CacheLock(around)
    with pytest.raises(RuntimeError, match="CUDA error"):
        lock.acquire()
    fails.clear()
    taken: list[bool] = []
    on_a_thread(lambda: taken.append(lock.acquire(blocking=False)) or lock.release())
    assert taken == [True]
    with lock, lock:
        on_a_thread(lambda: taken.append(lock.acquire(blocking=False)))
    assert taken == [True, False]
