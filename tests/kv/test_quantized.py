"""The eight-bit formats, to the bit: what a compiled writer must produce too."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as numpy_st
from torch import Tensor

from quire.kv.storage.entries import dequantize, quantize

FP8 = torch.float8_e4m3fn
# Below this, 127 / amax is no float32 any more; entries that small are as good as zero.
SMALL = 2.0**-120

Rows = npt.NDArray[np.float32]
HUGE = float(np.float32(3.4e38))  # the very last float32s would be rounded to infinity
finite = st.floats(-HUGE, HUGE, width=32)
usual = st.floats(-100, 100, width=32)
rows = numpy_st.arrays(np.float32, (3, 8), elements=usual | finite)


def int8(x: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = quantize(x, torch.int8)
    assert scales is not None
    return codes, scales


@given(x=rows)
def test_int8_is_the_formula_to_the_bit(x: Rows) -> None:
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(-1)
        products = x * (np.float32(127) / amax)[:, None]
        want = np.clip(np.rint(np.where(np.isnan(products), np.float32(0), products)), -127, 127)
    codes, scales = int8(torch.from_numpy(x))
    assert codes.tolist() == want.tolist()
    assert scales.tolist() == (amax / np.float32(127)).tolist()


@given(x=rows)
def test_int8_errs_by_half_a_step(x: Rows) -> None:
    codes, scales = int8(torch.from_numpy(x))
    back = dequantize(codes, scales)
    assert back.dtype == torch.float32
    amax = np.abs(x).max(-1, keepdims=True).astype(np.float64)
    bound = np.where(amax > SMALL, amax / 254 * (1 + 1e-4), amax)
    assert (np.abs(back.numpy().astype(np.float64) - x) <= bound).all()


@given(x=rows, at=st.integers(0, 7), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_what_is_not_finite_spoils_its_own_entry_only(x: Rows, at: int, bad: float) -> None:
    spoilt = x.copy()
    spoilt[1, at] = bad
    clean, clean_scales = int8(torch.from_numpy(x))
    codes, scales = int8(torch.from_numpy(spoilt))
    assert dequantize(codes, scales)[1].isnan().all()
    assert codes[1].tolist() == [0] * 8
    for row in (0, 2):
        assert torch.equal(codes[row], clean[row])
        assert scales[row] == clean_scales[row]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_zeros_and_other_dtypes(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -0.0], [2.0, -1.0], [0.5, 0.25]], dtype=dtype)
    codes, scales = int8(x)
    assert codes.tolist() == [[0, 0], [127, -64], [127, 64]]  # 63.5 goes to the even one
    assert scales.tolist() == [0.0, float(np.float32(2 / 127)), float(np.float32(0.5 / 127))]


@given(x=rows)
def test_fp8_rounds_to_four_bits_within_its_range(x: Rows) -> None:
    codes, scales = quantize(torch.from_numpy(x), FP8)
    assert codes.dtype == FP8
    assert scales is None
    back = dequantize(codes, None).double().numpy()
    within = np.clip(x.astype(np.float64), -448, 448)
    # Three bits behind the first, and 2^-9 apart below the smallest normal number.
    assert (np.abs(back - within) <= np.maximum(np.abs(within) * 2.0**-4, 2.0**-10)).all()


def test_fp8_keeps_nan_and_bounds_infinity() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, 449.0, 17.0, 19.0])
    back = dequantize(*quantize(x, FP8))
    assert back[0].isnan()
    assert back[1:].tolist() == [448.0, -448.0, 448.0, 448.0, 16.0, 20.0]  # ties to even


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_are_a_cast_and_come_back_as_they_are(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3)
    stored, scales = quantize(x, dtype)
    assert scales is None
    assert torch.equal(dequantize(stored, scales), x.to(dtype))
