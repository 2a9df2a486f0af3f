"""The kernels read and write nothing that is not theirs: on a GPU, no address behind it has to be.

Every address that the interpreter loads from or stores to is looked up. A sequence's own tokens are
readable from the first that the step may read to its end, in each part of its entries; and the
step's own tensors. Poison (elsewhere) shows what was used; this shows what was touched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from attention.triton.interpreter import backend, interpreter, shrink_tiles
from conformance.attention_cases import Case, make_case, make_sinks, make_spec
from quire.attention.triton import backend as attending
from quire.attention.triton import writers as writing


def element_addresses(x: Tensor) -> npt.NDArray[np.int64]:
    """Of each element, in bytes."""
    at = np.full((), x.data_ptr(), np.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        at = at[..., None] + np.arange(size) * stride * x.element_size()
    return at.ravel()


def entry_addresses(case: Case) -> npt.NDArray[np.int64]:
    """Of what the step may read of a layer."""
    view, found = case.view, []
    slots = torch.cat(case.slots)
    for part in (view.k, view.v, view.k_scale, view.v_scale):
        if part is None:
            continue
        # The last slots of ranges begin no row of the view, but have addresses: by strides.
        token, head = part.stride(2), part.stride(1)
        row = part.stride(0)
        own = (slots // view.slots_per_row) * row + (slots % view.slots_per_row) * token
        wide = part.stride(3) * np.arange(part.shape[3]) if part.dim() == 4 else np.zeros(1, int)
        at = own.numpy()[:, None, None] + head * np.arange(part.shape[1])[:, None] + wide
        found.append(part.data_ptr() + part.element_size() * at.ravel())
    return np.concatenate(found)


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Any]]]:
    """The addresses of the loads and the stores that it makes."""
    touched: dict[str, list[Any]] = {"load": [], "store": []}
    module = interpreter._interpreter

    class Watching:
        def __getattr__(self, name: str) -> Any:
            return getattr(module, name)

        def load(self, at: Any, mask: Any, *rest: Any) -> Any:
            touched["load"].append(at[np.broadcast_to(mask, at.shape)].astype(np.int64))
            return module.load(at, mask, *rest)

        def store(self, at: Any, value: Any, mask: Any) -> Any:
            touched["store"].append(at[np.broadcast_to(mask, at.shape)].astype(np.int64))
            return module.store(at, value, mask)

    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "_interpreter", Watching())
        yield touched


def outside(touched: list[Any], allowed: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.setdiff1d(np.concatenate(touched), np.concatenate(allowed))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "strategy", "kept", "num_splits"),
    [
        ("full", "paged", "bfloat16", "several"),
        ("sliding", "paged", "int8", "one"),
        ("sliding", "growing", "float16", "several"),
        ("chunked", "virtual-shared", "float8_e4m3fn", "several"),
        ("latent", "virtual", "int8", "one"),
    ],
)
def test_nothing_else_is_read(
    kind: str, strategy: str, kept: str, num_splits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_splits == "several":
        shrink_tiles(monkeypatch)
    spec = make_spec(kind, kv_heads=2, dims=(24, 12), dtype=kept)
    q_dtype = torch.bfloat16 if kept == "bfloat16" else torch.float16
    chunks = ((40, 1), (0, 9), (17, 3), (63, 1))
    case = make_case(spec, sharing=2, strategy=strategy, chunks=chunks, q_dtype=q_dtype)
    sinks = make_sinks(case.q.shape[1])
    batch = case.fresh_batch()
    placed = batch.on(case.q.device)
    with watched(monkeypatch) as touched:
        out = backend().attend(case.q, case.view, batch, spec=spec, scale=0.3, sinks=sinks)
    own = [element_addresses(x) for x in (case.q, sinks)]
    own += [element_addresses(x) for x in (placed.query_starts, placed.context_lens, placed.tables)]
    written = element_addresses(out)
    # Between the two kernels: what the first has written, the second reads.
    parts = np.setdiff1d(np.concatenate(touched["store"]), written)
    assert (len(parts) > 0) == (num_splits == "several")
    assert not len(outside(touched["load"], [*own, entry_addresses(case), parts]))
    assert set(np.concatenate(touched["store"])) >= set(written)


@pytest.mark.parametrize("kept", ["bfloat16", "int8"])
def test_a_cache_is_given_by_its_address(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's launcher refuses a tensor whose first byte is not mapped, as a cache's may not be."""
    given: list[Any] = []

    class Noting:
        def __init__(self, kernel: Any) -> None:
            self._kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                given.extend((*args, *options.values()))
                self._kernel[grid](*args, **options)

            return launch

    for module, name in ((attending, "attend"), (writing, "write"), (writing, "take")):
        monkeypatch.setattr(module, name, Noting(getattr(module, name)))
    spec = make_spec("full", kv_heads=2, dims=(16, 16), dtype=kept)
    case = make_case(spec, sharing=1, strategy="growing", chunks=((3, 2),), q_dtype=torch.bfloat16)
    case.attend(backend(), scale=0.3)
    backend().make_writer(case.view)(case.slots[0], case.keys[0], case.values[0])
    held = torch.zeros(4, 8)
    writing.TritonRows().take(held, torch.arange(2))
    cache = {case.view.k.untyped_storage().data_ptr(), held.untyped_storage().data_ptr()}
    tensors = [x for x in given if isinstance(x, Tensor)]
    assert tensors
    assert not cache & {x.untyped_storage().data_ptr() for x in tensors}
    assert {case.view.k.data_ptr(), held.data_ptr()} <= {x for x in given if type(x) is int}


@pytest.mark.parametrize("strategy", ["paged", "virtual"])
def test_nothing_else_is_written(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec("full", kv_heads=3, dims=(24, 12), dtype="int8")
    case = make_case(spec, sharing=1, strategy=strategy, chunks=((5, 9),), q_dtype=torch.float32)
    k, v, slots = case.keys[0], case.values[0], case.slots[0].clone()
    slots[3:5] = -1
    write = backend().make_writer(case.view)
    with watched(monkeypatch) as touched:
        write(slots, k, v)
    own = [element_addresses(x) for x in (slots, k, v)]
    assert not len(outside(touched["load"], own))
    assert not len(outside(touched["store"], [entry_addresses(case)]))
