"""An engine with FlashInfer, on a pretended GPU both: each tensor is where it has to be."""

import weakref
from collections.abc import Iterator

import pytest

import pretend
from attention.pretend_flashinfer import pretended_backend
from devices.test_engine import GREEDY, expected, generated, on
from pretend import Gpu, PretendAttention
from quire.attention.flashinfer import FlashInferAttention
from quire.engine import assembly
from quire.kv import STRATEGIES
from tiny import tiny_model


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    # In float32, which FlashInfer has no kernels for: tokens are to be the same.
    monkeypatch.setattr("quire.attention.flashinfer.backend.refused", lambda q, view: None)
    backend = pretended_backend(real=False, make_writer=PretendAttention().make_writer)
    monkeypatch.setattr(assembly, "choose_backend", lambda *_, **__: backend)
    with pretend.cuda() as found:
        yield found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("gpt_oss", "paged"),
        *(
            pytest.param("gemma3", each, marks=[] if each == "growing" else pytest.mark.full)
            for each in STRATEGIES
        ),
    ],
)
def test_graphs_and_eager_steps_give_the_tokens_of_generate(
    name: str, strategy: str, gpu: Gpu
) -> None:
    model = tiny_model(name)
    want = expected(model)
    with on(gpu, model, cache=strategy) as llm:
        assert llm.attention_backend == "flashinfer"
        gpu.reset()
        assert generated(llm) == want
        assert gpu.num_replays == GREEDY.max_tokens - 1


def test_without_a_writer_of_its_own_nothing_is_captured(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch writes every row of a step, padding too."""
    backend = pretended_backend(real=False)
    assert backend.replays is None
    monkeypatch.setattr(assembly, "choose_backend", lambda *_, **__: backend)
    model = tiny_model("gemma3")
    want = expected(model)
    with on(gpu, model) as llm:
        gpu.reset()
        assert generated(llm) == want
        assert gpu.num_replays == 0


def test_its_workspace_goes_when_the_engine_is_closed(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[object]] = []

    def choose(*_: object, **__: object) -> FlashInferAttention:
        backend = pretended_backend(real=False, make_writer=PretendAttention().make_writer)
        made.append(weakref.ref(backend))
        return backend

    monkeypatch.setattr(assembly, "choose_backend", choose)
    llm = on(gpu, tiny_model("gemma3"))
    generated(llm)
    backend = made[-1]()
    assert isinstance(backend, FlashInferAttention)
    (workspace,) = (weakref.ref(each) for each in backend._workspaces.values())
    del backend
    assert workspace() is not None
    llm.close()
    assert [each() for each in made] == [None] * len(made)
    assert workspace() is None


def test_latents_run_without_graphs(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("deepseek_v3")
    want = expected(model)
    with on(gpu, model) as llm:
        assert "FlashInfer's kernels for latents are not captured" in caplog.text
        gpu.reset()
        assert generated(llm) == want
        assert gpu.num_replays == 0
