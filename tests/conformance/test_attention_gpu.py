"""The kernels of a GPU, for real: each kind of layer in each kind of step gives the formula's.

The rows are the grid's sample, without what only says on which CPU; and what FlashInfer is made
for, which the sample has little of.
"""

from functools import cache
from typing import Any

import pytest
import torch

import target
from attention.pretend_flashinfer import pretended_backend
from conformance.attention_cases import (
    STORED,
    TOLERANCE,
    Case,
    error,
    formula,
    same_bits,
)
from conformance.attention_grid import EXTRAS, SAMPLE, SHARING, build, name_of, steps_of
from conformance.covering import Row, cover
from quire.attention import AttentionBackend
from quire.attention.flashinfer import FlashInferAttention
from quire.attention.flashinfer.backend import LATENT_ROWS, cannot_run, cannot_serve

pytestmark = pytest.mark.gpu(emulated=True)

WIDE = tuple(
    {"isa": "native", **row}
    for row in cover(
        {
            "dtypes": (
                ("bfloat16", "bfloat16"),
                ("float16", "float16"),
                ("bfloat16", "float8_e4m3fn"),
            ),
            "widths": ((128, 128), (64, 64), (256, 256), (512, 64, "latent")),
            "sharing": SHARING,
            "extras": EXTRAS,
        }
    )
)
ROWS = (*SAMPLE, *WIDE)
# Once a GPU has multiplied in tensor cores, float32 is what it was asked to be: no TF32 anywhere.
GPU_TOLERANCE = {**TOLERANCE, torch.float32: 2e-5}


@cache
def backend(name: str) -> AttentionBackend:
    if name == "flashinfer":
        return FlashInferAttention() if target.on_gpu() else pretended_backend()
    from quire.attention.triton import TritonAttention  # comes with torch for CUDA alone

    return TritonAttention()


def attend(name: str, row: Row, step: Row) -> tuple[str, Any] | None:
    """(what is wrong, the backend's result); None where it is not asked for that."""
    built = build(row, step)
    if built is None:
        return None
    case, options = built
    if (cannot_serve(case.spec) if name == "flashinfer" else unsupported(name, case)) is not None:
        return None
    if name == "flashinfer" and case.q.dtype == torch.float32:
        return None
    cannot = options["softcap"] is not None or LATENT_ROWS % case.q.shape[1]
    if name == "flashinfer" and "latent" in row["widths"] and cannot:
        return None
    got = case.attend(backend(name), **options)
    want = formula(case, **options)
    assert got.shape == want.shape
    assert got.dtype == case.q.dtype
    found = error(got, want)
    most = GPU_TOLERANCE[got.dtype] * (1.5 if name == "flashinfer" else 1)
    return ("" if found <= most else f"error {found:.1e}"), (case, options, got)


@pytest.mark.parametrize("number", range(len(ROWS)), ids=[name_of(row) for row in ROWS])
@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_gpu_gives_what_the_formula_gives(name: str, number: int) -> None:
    row, served = ROWS[number], 0
    if (why := missing(name)) is not None:
        pytest.skip(f"{name}: {why}")
    for step in steps_of(number):
        if (found := attend(name, row, step)) is not None:
            assert not found[0], step
            served += 1
    if not served:
        pytest.skip(f"{name} serves no such layer")


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
@pytest.mark.parametrize("strategy", STORED)
def test_the_same_call_gives_the_same_bits(name: str, strategy: str) -> None:
    if (why := missing(name)) is not None:
        pytest.skip(f"{name}: {why}")
    row = {**WIDE[0], "widths": (128, 128), "dtypes": ("bfloat16", "bfloat16"), "sharing": 4}
    step = {"kind": ("full", 0), "mix": "mixed", "block_size": 16, "scores": "usual"}
    found = attend(name, row, {**step, "strategy": strategy, "threads": 1})
    assert found is not None
    case, options, first = found[1]
    for _ in range(3):
        assert same_bits(case.attend(backend(name), **options), first)


def unsupported(name: str, case: Case) -> str | None:
    return backend(name).unsupported(case.spec, target.device())


@cache
def missing(name: str) -> str | None:
    """Why a backend cannot be tried at all."""
    if name == "flashinfer":
        return cannot_run(target.device()) if target.on_gpu() else None
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return str(error)
    if not target.on_gpu():
        return "its interpreter copies whole tensors, and so reads where nothing is committed"
    return None
