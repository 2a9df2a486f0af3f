"""Graphs of decode steps: which sizes, when they go, and what runs where there can be none."""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import pretend
from pretend import Gpu, PretendAttention, PretendMemory
from quire import LLM, SamplingParams
from quire.attention import AttentionBatch, SdpaAttention, backend_for_graphs, choose
from quire.engine import assembly
from quire.engine.runner import ModelRunner
from quire.models import cuda_graphs as captured
from quire.models.cuda_graphs import CapturedDecodes, graph_sizes
from quire.spec import FullAttention
from tiny import tiny_model, tokens

PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (5, 17, 9)]
SIZES: dict[str, Any] = dict(
    max_model_len=64, kv_cache_memory_bytes="32MB", max_num_seqs=3, max_num_batched_tokens=48
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setattr(assembly, "choose_backend", lambda *_, **__: PretendAttention())
    with pretend.cuda() as found:
        yield found


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)


def texts(llm: LLM, num_tokens: int = 8) -> list[tuple[int, ...]]:
    return [c.token_ids for c in llm.generate(PROMPTS, greedy(num_tokens))]


def own(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """What Transformers generates."""
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [
        tuple(model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist()) for p in PROMPTS
    ]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (4, [1, 2, 4]), (20, [1, 2, 4, 8, 16, 20])],
)
def test_sizes_are_few_and_end_with_all(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes
    assert graph_sizes(512)[-2:] == [496, 512]


def test_steps_of_any_size_are_replayed(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = tiny_model("llama")
    want = own(model)
    llm = LLM(model.to("cuda"), provider=PretendMemory(gpu), **SIZES)
    assert "3 CUDA graphs of decode steps, up to 3 sequences" in caplog.text
    gpu.reset()
    params = [greedy(n) for n in (8, 3, 5)]  # 3, then 2, then 1
    got = [c.token_ids for c in llm.generate(PROMPTS, params)]
    assert got == [text[:n] for text, n in zip(want, (8, 3, 5), strict=True)]
    assert gpu.num_replays == 7
    # A replay, the copy of tables, and what the sampler does: not a launch for every operation.
    gpu.reset()
    llm.generate(PROMPTS, greedy(8))
    assert len(gpu.launches) - gpu.launches.index("graph") < 7 * 12


@dataclass
class ByTheHost:
    """A backend whose calls are planned by the host; what it writes with is the other's."""

    kernels: PretendAttention = field(default_factory=PretendAttention)
    name = "planned"
    plays = replays = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernels, name)

    def attend(self, q: torch.Tensor, view: Any, batch: AttentionBatch, **options: Any) -> Any:
        assert len(batch.chunks()) == len(batch.on(q.device).context_lens)
        assert (batch.context_lens > 0).all(), "a step that is captured"
        return self.kernels.attend(q, view, batch, **options)


def test_who_cannot_be_captured_leaves_such_steps_to_another(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "choose_backend", lambda *_, **__: ByTheHost())
    monkeypatch.setattr(assembly, "backend_for_graphs", lambda *_: PretendAttention())
    model = tiny_model("gemma3")
    want = own(model)
    llm = LLM(model.to("cuda"), provider=PretendMemory(gpu), **SIZES)
    assert llm.attention_backend == "planned"
    gpu.reset()
    assert texts(llm) == want
    assert gpu.num_replays == 7


def test_only_an_open_choice_is_another_one_there(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, device = (
        FullAttention(num_kv_heads=2, head_dim=16, dtype="float32"),
        torch.device("cuda", 0),
    )
    chosen: Any = ByTheHost()
    monkeypatch.setattr(choose, "_find", lambda *_: PretendAttention())
    assert backend_for_graphs(chosen, "planned", [spec], device) is chosen
    assert backend_for_graphs(chosen, "auto", [spec], device).name == "pretend"
    assert backend_for_graphs(chosen, "auto", [spec], torch.device("cpu")) is chosen
    assert backend_for_graphs(chosen.kernels, "auto", [spec], device) is chosen.kernels
    assert backend_for_graphs(SdpaAttention(), "auto", [spec], device).name == "sdpa"
    monkeypatch.setattr(choose, "_find", lambda *_: "there is none")
    assert backend_for_graphs(chosen, "auto", [spec], device) is chosen


def test_a_cache_that_began_anew_is_captured_anew(gpu: Gpu) -> None:
    llm = LLM(tiny_model("llama").to("cuda"), provider=PretendMemory(gpu), **SIZES)
    before = texts(llm)
    assert llm.reset_prefix_cache()
    llm.engine.begin_anew()
    gpu.reset()
    assert texts(llm) == before
    assert gpu.num_replays == 7 + 1  # and one to see whether it does the same


def test_a_model_that_was_changed_is_captured_anew(gpu: Gpu) -> None:
    model = tiny_model("llama").to("cuda")
    llm = LLM(model, provider=PretendMemory(gpu), **SIZES, enable_prefix_caching=False)
    before = texts(llm)
    weight = tiny_model("llama", seed=1).model.layers[0].mlp.down_proj.weight
    model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(weight.to("cuda"), False)
    after = texts(llm)
    fresh = LLM(model, provider=PretendMemory(gpu), **SIZES, enable_prefix_caching=False)
    assert after == texts(fresh) != before


def test_what_asks_the_host_runs_without(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    want = own(model)
    model.to("cuda")
    layer = model.model.layers[1].mlp
    forward = type(layer).forward

    def asks(x: torch.Tensor) -> torch.Tensor:
        assert x.abs().max().item() >= 0
        return forward(layer, x)

    layer.forward = asks
    llm = LLM(model, provider=PretendMemory(gpu), **SIZES)
    assert "runs without CUDA graphs" in caplog.text
    gpu.reset()
    assert texts(llm) == want
    assert not gpu.num_replays


def test_a_failed_capture_is_said_once(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("gemma3").to("cuda")
    module = model.model.layers[1].mlp
    act = module.act_fn

    class Asks(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return act(x) if bool((x == x).all()) else x

    module.act_fn = Asks()
    llm = LLM(model, provider=PretendMemory(gpu), **SIZES)
    assert len(texts(llm)) == len(PROMPTS)
    said = [r.message for r in caplog.records if "CUDA graphs" in r.message]
    assert len(said) == 1
    assert "not permitted when stream is capturing" in said[0]


class BakesIn(PretendAttention):
    """Attends to what the host had when it was launched: nothing, for padding."""

    def attend(self, q: torch.Tensor, view: Any, batch: AttentionBatch, **options: Any) -> Any:
        out = super().attend(q, view, batch, **options)
        return out if batch.context_lens.any() else out.new_zeros(out.shape)


def test_rows_that_read_memory_are_tried_too(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Padding gives the same either way."""
    monkeypatch.setattr(assembly, "choose_backend", lambda *_, **__: BakesIn())
    model = tiny_model("llama")
    want = own(model)
    llm = LLM(model.to("cuda"), provider=PretendMemory(gpu), **SIZES)
    assert "where they are replayed, attention by pretend: it gives other logits" in caplog.text
    gpu.reset()
    assert texts(llm) == want
    assert not gpu.num_replays


class Short:
    """A device that has no memory for a capture, so many times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_left = self.num_tried = 0
        self._graph = torch.cuda.graph
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    @contextmanager
    def graph(self, *args: Any, **options: Any) -> Iterator[None]:
        is_step = "pool" in options
        self.num_tried += is_step
        with self._graph(*args, **options):
            yield
            if self.num_left and is_step:
                self.num_left -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def test_a_capture_that_memory_was_short_for_is_tried_again(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(captured, "_PATIENCE", 5)
    short, model = Short(monkeypatch), tiny_model("llama")
    want = own(model)
    llm = LLM(model.to("cuda"), provider=PretendMemory(gpu), **SIZES)
    assert short.num_tried == 3
    llm.engine.begin_anew()  # and all are to be captured once more
    short.num_left = 2
    for num_tried, num_replays in ((5, 0), (5, 0), (6, 4 + 1)):
        gpu.reset()
        assert texts(llm) == want  # in 7 steps
        assert (short.num_tried, gpu.num_replays) == (num_tried, num_replays)
    said = [r.message for r in caplog.records if "run without a CUDA graph" in r.message]
    assert ["again in 5 steps" in said[0], "again in 10 steps" in said[1]] == [True] * 2
    assert len(said) == 2


def test_who_has_a_graph_goes_on_with_it_while_another_cannot_be_captured(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Short(monkeypatch)
    llm = LLM(tiny_model("llama").to("cuda"), provider=PretendMemory(gpu), **SIZES)
    llm.engine.begin_anew()
    llm.generate(PROMPTS[:1], greedy(4))
    short.num_left = 1
    before = texts(llm)
    gpu.reset()
    llm.generate(PROMPTS[:1], greedy(4))
    assert gpu.num_replays == 3
    llm.engine.begin_anew()  # with memory again, and no patience
    gpu.reset()
    assert texts(llm) == before
    assert gpu.num_replays == 7 + 1


def captured_of(llm: LLM) -> CapturedDecodes:
    runner = llm.engine._runner
    assert isinstance(runner, ModelRunner)
    assert runner._captured is not None
    return runner._captured


def test_all_sizes_share_a_stream_and_what_comes_out(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[dict[str, Any]] = []
    plain, pools = torch.cuda.graph, iter(range(100))

    def graph(own: Any, **options: Any) -> Any:
        captures.append(options)
        return plain(own, **options)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (1 + next(pools), 0))
    llm = LLM(tiny_model("llama").to("cuda"), provider=PretendMemory(gpu), **SIZES)
    own: Any = captured_of(llm)
    assert [options["stream"] is own._stream for options in captures] == [True] * 3
    assert {options["pool"] for options in captures} == {(1, 0)}
    assert {g.logits.inner.data_ptr() for g in own._graphs.values()} == {
        own._logits.inner.data_ptr()
    }
    # Torch refuses a pool all of whose graphs are gone, if anything of it is still there.
    llm.engine.begin_anew()
    texts(llm)
    assert captures[3]["pool"] == (2, 0)


def test_a_failed_capture_leaves_the_stream_as_it_was(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = [torch.cuda.current_stream()]

    @contextmanager
    def stream(other: Any) -> Iterator[None]:
        before, current[0] = current[0], other
        try:
            yield
        finally:
            current[0] = before

    class Fails:
        """As torch's: where a capture cannot be ended, its stream is not left."""

        def __init__(self, _: Any, stream: Any = None, **__: Any) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            current[0] = self._stream

        def __exit__(self, *_: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "graph", Fails)
    before = current[0]
    llm = LLM(tiny_model("llama").to("cuda"), provider=PretendMemory(gpu), **SIZES)
    assert current[0] is before
    assert not gpu.num_replays
    assert len(texts(llm)) == len(PROMPTS)


def test_a_pool_that_captures_into_have_failed_goes_with_its_last_graph(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[Any] = []
    monkeypatch.setattr(captured, "_PATIENCE", 1)
    monkeypatch.setattr(captured, "give_back_pool", lambda _, *pool: given_back.append(pool))
    short = Short(monkeypatch)
    llm = LLM(tiny_model("llama").to("cuda"), provider=PretendMemory(gpu), **SIZES)
    llm.engine.begin_anew()
    llm.generate(PROMPTS[:1], greedy(4))  # a graph for one
    short.num_left = 2
    texts(llm)
    assert captured_of(llm)._graphs
    assert not given_back
    llm.close()
    assert given_back == [((0, 0), 2)]


def test_graphs_go_when_the_engine_is_closed(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[bool] = []
    llm = LLM(tiny_model("llama").to("cuda"), provider=PretendMemory(gpu), **SIZES)
    texts(llm)
    own = captured_of(llm)
    graphs = [weakref.ref(each.graph) for each in own._graphs.values()]
    assert len(graphs) == 3
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: given_back.append(not any(g() for g in graphs))
    )
    llm.close()
    assert given_back
    assert all(given_back)
    assert not own._tables
    assert own._logits is None
    assert not own._room.numel()
    assert llm.engine._runner._captured is None  # type: ignore[attr-defined]
