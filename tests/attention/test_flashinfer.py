"""FlashInfer by its documented rules: what it is told, what comes back, what it is not asked."""

import ast
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attention import pretend_flashinfer as pretended
from attention.pretend_flashinfer import pretend_flashinfer
from attention.pretend_flashinfer import pretended_backend as backend
from conformance.attention_cases import (
    STORED,
    TOLERANCE,
    Case,
    error,
    formula,
    make_case,
    make_sinks,
    make_spec,
    same_bits,
)
from quire.attention import AttentionBatch, PlacedBatch
from quire.attention.flashinfer import FlashInferAttention
from quire.attention.flashinfer.backend import cannot_run, cannot_serve
from quire.attention.flashinfer.wrappers import page_tables, page_tokens_of
from quire.errors import ConfigError
from quire.kv import LayerView
from quire.spec import FullAttention, LatentAttention

MIXES = {
    "decodes": ((30, 1), (0, 1), (63, 1), (64, 1), (149, 1), (7, 1)),
    "prefill": ((0, 17), (0, 40), (0, 66)),
    "decodes, then prefill": ((31, 1), (90, 1), (5, 7), (0, 13)),
    "mixed": ((0, 13), (31, 1), (5, 7), (0, 1), (40, 12), (8, 1), (90, 2)),
}
EXTRAS = ((None, False), (2.0, False), (None, True), (1.5, True))


def wide_case(
    kind: str = "full", strategy: str = "paged", dtype: str = "bfloat16", **given: Any
) -> Case:
    dims = (512, 64) if kind == "latent" else (64, 64)
    spec = make_spec(kind, kv_heads=2, dims=dims, dtype=dtype, reach=given.pop("reach", 0))
    q_dtype = torch.bfloat16 if dtype.startswith("float8") else None
    sharing = 4 if kind == "latent" else 3
    options = {"sharing": sharing, "block_size": 16, "q_dtype": q_dtype, "strategy": strategy}
    return make_case(spec, **{**options, **given})


@pytest.mark.sampled(20)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kind", ["full", "sliding", "latent"])
@pytest.mark.parametrize("strategy", STORED)
def test_it_gives_what_the_formula_gives(strategy: str, kind: str, mix: str) -> None:
    dtypes = (
        ("bfloat16", "float16") if kind == "latent" else ("bfloat16", "float16", "float8_e4m3fn")
    )
    for number, dtype in enumerate(dtypes, list(MIXES).index(mix)):
        case = wide_case(kind, strategy, dtype, chunks=MIXES[mix], reach=37)
        assert cannot_serve(case.spec) is None
        softcap, has_sinks = EXTRAS[number % len(EXTRAS)]
        sinks = make_sinks(case.q.shape[1]) if has_sinks else None
        softcap = None if kind == "latent" else softcap
        options = dict(scale=0.1, softcap=softcap, sinks=sinks)
        found = error(case.attend(backend(), **options), formula(case, **options))
        # A sink is put in after the result was rounded once.
        most = TOLERANCE[case.q.dtype] * (1.5 if has_sinks else 1)
        assert found <= most, (dtype, softcap, has_sinks)


@pytest.mark.parametrize("heads", [3, 20, 71])
def test_latents_of_heads_that_leave_a_tile_partly_empty_are_refused(heads: int) -> None:
    """FlashInfer itself refuses some of their steps, and which ones shows only in serving."""
    case = wide_case("latent", "paged", chunks=MIXES["mixed"], sharing=heads)
    with pytest.raises(ConfigError, match=f"not {heads}: .* Choose attention_backend='triton'"):
        case.attend(backend(), scale=0.1)


@pytest.mark.parametrize("strategy", STORED)
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_it_reads_nothing_beyond_its_pages(strategy: str, kind: str) -> None:
    """All that is not part of a sequence's live pages is NaN."""
    case = wide_case(kind, strategy, chunks=MIXES["mixed"], reach=37)
    case.poison()
    assert case.attend(backend(), scale=0.1).isfinite().all()


def test_a_plan_serves_every_layer_of_a_step_and_no_other_step() -> None:
    plans = []
    library = pretend_flashinfer()

    class Counted(pretended.Decode):
        def plan(self, *args: Any, **given: Any) -> None:
            plans.append(args)
            super().plan(*args, **given)

    library.BatchDecodeWithPagedKVCacheWrapper = lambda *args, **given: Counted(
        *args, **given, wants=pretended.Wants()
    )
    case, other = (wide_case(chunks=MIXES["decodes"], seed=seed) for seed in (0, 1))
    flashinfer = FlashInferAttention(library, workspace_bytes=2**12)
    batch, second = case.fresh_batch(), other.fresh_batch()

    def attend(case: Case, batch: Any, scale: float = 0.1) -> torch.Tensor:
        return flashinfer.attend(case.q, case.view, batch, spec=case.spec, scale=scale)

    want = case.attend(backend(), scale=0.1)
    for _ in range(3):
        assert same_bits(attend(case, batch), want)
    assert len(plans) == 1
    # Another batch between two layers: the plan is made again, not taken for its own.
    assert same_bits(attend(other, second), other.attend(backend(), scale=0.1))
    assert same_bits(attend(case, batch), want)
    assert len(plans) == 3
    # Layers of another scale have a plan of their own, and leave this one alone.
    assert same_bits(attend(case, batch, 0.3), case.attend(backend(), scale=0.3))
    assert same_bits(attend(case, batch), want)
    assert len(plans) == 4


def test_rows_of_padding_are_zeros_and_are_not_planned() -> None:
    """As a step that was padded to a recorded size has them."""
    case = wide_case(chunks=MIXES["decodes"])
    want = case.attend(backend(), scale=0.1)
    batch = case.fresh_batch()
    padded = replace(
        batch,
        query_starts=np.append(batch.query_starts, [7, 8]),
        context_lens=np.append(batch.context_lens, [0, 0]),
        tables=torch.cat([batch.tables, torch.full((2, batch.tables.shape[1]), -1)]),
        slots=torch.cat([batch.slots, torch.full((2,), -1)]),
    )
    q = torch.cat([case.q, torch.full_like(case.q[:2], torch.nan)])
    got = backend().attend(q, case.view, padded, spec=case.spec, scale=0.1)
    assert same_bits(got[:6], want)
    assert not got[6:].any()


class Nothing:
    """A writer that is not asked."""

    def __init__(self, view: LayerView) -> None:
        pass

    def __call__(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        raise AssertionError


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("strategy", STORED)
def test_a_captured_step_is_planned_before_each_replay(
    strategy: str, kind: str, has_sinks: bool
) -> None:
    """A graph plays what was captured with padding, over arrays that stay where they are."""
    case = wide_case(kind, strategy, chunks=MIXES["decodes"], reach=37)
    flashinfer, size = backend(make_writer=Nothing), 8
    assert flashinfer.replays is not None
    sinks = make_sinks(case.q.shape[1]) if has_sinks else None
    width = max(case.batch.tables.shape[1], 1)
    placed = PlacedBatch(
        query_starts=torch.arange(size + 1, dtype=torch.int32),
        context_lens=torch.zeros(size, dtype=torch.int32),
        tables=torch.zeros(size, width, dtype=torch.int32),
        slots=torch.full((size,), -1),
        max_query_len=1,
        max_context_len=200,
    )
    q = torch.zeros(size, *case.q.shape[1:], dtype=case.q.dtype)
    padding = AttentionBatch(
        query_starts=np.arange(size + 1),
        context_lens=np.zeros(size, np.int64),
        tables=torch.zeros(size, 0, dtype=torch.long),
        slots=placed.slots,
        block_size=case.batch.block_size,
        memo={q.device: placed},
    )

    def play() -> torch.Tensor:
        """What a graph does: the same again, wherever it reads."""
        return flashinfer.attend(q, case.view, padding, spec=case.spec, scale=0.1, sinks=sinks)

    with torch.inference_mode():  # a capture's mode; plans are made again outside of it
        assert not play().any()
    for num_seqs in (6, 3):
        few = slice(num_seqs)
        step = AttentionBatch(
            query_starts=np.arange(size + 1),
            context_lens=np.pad(case.batch.context_lens[few], (0, size - num_seqs)),
            tables=torch.cat([case.batch.tables[few], torch.full((size - num_seqs, width), -1)]),
            slots=placed.slots,
            block_size=case.batch.block_size,
            memo={q.device: placed},
        )
        placed.context_lens.copy_(torch.from_numpy(step.context_lens))
        q[few] = case.q[few]
        flashinfer.replays.prepare(step)
        got = play()
        want = case.attend(backend(), scale=0.1, sinks=sinks)
        assert same_bits(got[few], want[few])
        assert not got[few.stop :].any()


def test_latents_are_not_captured() -> None:
    case = wide_case("latent", chunks=MIXES["decodes"])
    padding = replace(case.fresh_batch(), context_lens=np.zeros(6, np.int64))
    with pytest.raises(RuntimeError, match="latents are not captured"):
        backend(make_writer=Nothing).attend(case.q, case.view, padding, spec=case.spec, scale=0.1)


@pytest.mark.parametrize("strategy", STORED)
def test_pages_are_those_that_a_window_leaves(strategy: str) -> None:
    case = wide_case("sliding", strategy, chunks=((149, 1), (3, 1), (100, 30)), reach=37)
    batch = case.batch
    tables = page_tables(
        case.spec,
        batch,
        np.arange(3),
        page_tokens=page_tokens_of(case.view),
        of_ranges=case.view.slots_per_row == 1,
    )
    assert tables.page_tokens == page_tokens_of(case.view) == (16 if strategy == "paged" else 64)
    assert tables.query_starts.tolist() == [0, 1, 2, 32]
    kept = tables.context_lens.tolist()
    for i, (start, stop) in enumerate(pairwise(tables.page_starts.tolist())):
        assert stop - start == -(-kept[i] // tables.page_tokens)
        assert tables.last_page_tokens[i] == (kept[i] - 1) % tables.page_tokens + 1
        # What is left is what the first query reads, and at most the rest of its first page.
        beyond = kept[i] - (int(batch.context_lens[i]) - case.firsts[i])
        assert 0 <= beyond < (16 if strategy == "paged" else 1)


def test_what_it_cannot_serve_is_said_in_words() -> None:
    def said(kind: str, dims: tuple[int, int], dtype: str = "bfloat16") -> str:
        return cannot_serve(make_spec(kind, kv_heads=2, dims=dims, dtype=dtype)) or ""

    assert "no mask for attention in chunks" in said("chunked", (64, 64))
    assert "no kernel for int8 entries" in said("full", (64, 64), "int8")
    assert "no kernel for float32 entries" in said("full", (64, 64), "float32")
    assert "not 80" in said("full", (80, 80))
    assert "not of 192 and 128" in said("full", (192, 128))
    assert "not 256 and 64" in said("latent", (256, 64))
    assert "in 16 bits only" in said("latent", (512, 64), "float8_e4m3fn")
    short = LatentAttention(latent_dim=512, rope_dim=64, dtype="bfloat16", compress_ratio=4)
    assert "these stand for 4" in (cannot_serve(short) or "")
    assert not said("sliding", (128, 128), "float8_e4m3fn")


def test_where_it_cannot_run_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, limits = torch.device("cuda"), "quire.attention.flashinfer.backend."
    installed = {"flashinfer"}
    monkeypatch.setattr(limits + "find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(limits + "_NVCC", Path("/nowhere/nvcc"))
    monkeypatch.setattr(limits + "shutil.which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU" in (cannot_run(gpu) or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "this GPU has 7.5" in (cannot_run(gpu) or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "no nvcc" in (cannot_run(gpu) or "")
    installed.add("flashinfer_jit_cache")
    assert cannot_run(gpu) is None
    assert "not on cpu" in (cannot_run(torch.device("cpu")) or "")
    installed.clear()
    assert "pip install 'quire-kv[flashinfer]'" in (cannot_run(gpu) or "")


def test_what_only_a_call_shows_is_refused_with_the_way_out() -> None:
    case = wide_case(dtype="float8_e4m3fn")
    with pytest.raises(ConfigError, match=r"not float32\. Choose attention_backend='triton'"):
        replace(case, q=case.q.float()).attend(backend(), scale=1.0)
    half = wide_case(dtype="float16")
    with pytest.raises(ConfigError, match=r"bfloat16 cannot meet entries in torch\.float16"):
        replace(half, q=half.q.bfloat16()).attend(backend(), scale=1.0)
    with pytest.raises(ConfigError, match="it caps no scores of latents"):
        wide_case("latent").attend(backend(), scale=1.0, softcap=2.0)
    far = torch.empty_strided(
        (1, 2, 1, 64), (64, 2**32, 64, 1), dtype=torch.bfloat16, device="meta"
    )
    view = LayerView(k=far, v=far, slots_per_row=1)
    spec = FullAttention(num_kv_heads=2, head_dim=64, dtype="bfloat16")
    with pytest.raises(ConfigError, match="heads lie 4294967296 elements apart"):
        backend().attend(case.q, view, case.fresh_batch(), spec=spec, scale=1.0)


@pytest.mark.parametrize(
    ("wrapper", "pretend", "file"),
    [
        ("BatchDecodeWithPagedKVCacheWrapper", pretended.Decode, "decode.py"),
        ("BatchPrefillWithPagedKVCacheWrapper", pretended.Prefill, "prefill.py"),
        ("BatchMLAPagedAttentionWrapper", pretended.Latent, "mla"),
    ],
)
def test_signatures_are_the_packages(wrapper: str, pretend: type, file: str) -> None:
    """By its source: to import it takes a GPU's libraries."""
    package = find_spec("flashinfer")
    if package is None or package.origin is None:
        pytest.skip("flashinfer is not installed: the pretended one is compared with nothing")
    real = _methods(Path(package.origin).parent / file, wrapper)
    for name in ("__init__", "plan", "run"):
        (ours,) = _methods(Path(pretended.__file__), pretend.__name__)[name]
        for number, (parameter, has_default) in enumerate(ours):
            if parameter == "wants":
                continue
            theirs = [given for given in real[name] if parameter in dict(given)]
            assert theirs, (wrapper, name, parameter)
            if not has_default:  # required, and given by its place
                places = {
                    given.index((parameter, False))
                    for given in theirs
                    if (parameter, False) in given
                }
                assert places <= {number}, (wrapper, name, parameter)


def _methods(path: Path, wrapper: str) -> dict[str, list[list[tuple[str, bool]]]]:
    """The parameters of each definition of a method: overloads and parts have several."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    found: dict[str, list[list[tuple[str, bool]]]] = {}
    for file in files:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.name == wrapper:
                for each in node.body:
                    if isinstance(each, ast.FunctionDef):
                        name = "plan" if each.name == "_plan_impl" else each.name
                        found.setdefault(name, []).append(_arguments(each))
    assert found, f"{wrapper} is not in {path}"
    return found


def _arguments(node: ast.FunctionDef) -> list[tuple[str, bool]]:
    """(name, has a default), without ``self``."""
    given = node.args
    required = len(given.args) - len(given.defaults)
    places = [(each.arg, number >= required) for number, each in enumerate(given.args)]
    return [*places[1:], *((each.arg, True) for each in given.kwonlyargs)]
