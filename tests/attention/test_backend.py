"""What CpuAttention says it cannot do, refuses, and remembers of a step."""

import gc
import weakref
from typing import Any

import pytest
import torch

from attention.machines import cpu_backend
from conformance.attention_cases import Case, make_case, make_sinks, make_spec, same_bits
from quire.spec import FullAttention


def small_case(chunks: tuple[tuple[int, int], ...] = ((20, 1), (5, 3))) -> Case:
    spec = make_spec("full", kv_heads=2, dims=(16, 16), dtype="float32")
    return make_case(spec, sharing=3, chunks=chunks)  # a kernel that other suites compile too


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"])
def test_these_dtypes_are_supported(dtype: str) -> None:
    for kind in ("full", "latent"):
        spec = make_spec(kind, kv_heads=1, dims=(16, 8), dtype=dtype)
        assert cpu_backend("native").unsupported(spec, torch.device("cpu")) is None


def test_what_is_not_supported_has_a_reason() -> None:
    backend, cpu = cpu_backend("native"), torch.device("cpu")
    for dtype in ("float64", "float8_e5m2"):
        spec = FullAttention(num_kv_heads=1, head_dim=16, dtype=dtype)
        assert dtype in (backend.unsupported(spec, cpu) or "")
    spec = FullAttention(num_kv_heads=1, head_dim=16, dtype="float32")
    assert "meta" in (backend.unsupported(spec, torch.device("meta")) or "")


def test_queries_that_do_not_fit_are_refused() -> None:
    case, backend = small_case(), cpu_backend("native")
    for q in (case.q[:-1], case.q[:, :5], case.q[..., :-1], torch.cat([case.q, case.q])):
        with pytest.raises(ValueError):
            backend.attend(q, case.view, case.fresh_batch(), spec=case.spec, scale=1.0)


def test_layers_of_a_step_may_differ_in_what_they_are_given() -> None:
    """What is remembered of one call is not taken for another."""
    case, backend = small_case(), cpu_backend("native")
    sinks = make_sinks(6)
    given: tuple[dict[str, Any], ...] = (
        {"scale": 0.5},
        {"scale": 2.0},
        {"scale": 2.0, "softcap": 30.0, "sinks": sinks},
        {"scale": 2.0, "softcap": 10.0, "sinks": 2 * sinks},
        {"scale": 0.5},
    )
    batch = case.fresh_batch()
    for options in given:
        want = case.attend(backend, **options)
        got = backend.attend(case.q, case.view, batch, spec=case.spec, **options)
        assert same_bits(got, want), options


def test_a_spec_that_is_gone_is_not_mistaken_for_the_next() -> None:
    """Python gives a new object the id of a dead one."""
    case, backend = small_case(((40, 1), (30, 5))), cpu_backend("native")
    batch = case.fresh_batch()
    for window in range(2, 12):
        spec = make_spec("sliding", kv_heads=2, dims=(16, 16), dtype="float32", reach=window)
        got = backend.attend(case.q, case.view, batch, spec=spec, scale=2.0)
        want = backend.attend(case.q, case.view, case.fresh_batch(), spec=spec, scale=2.0)
        assert same_bits(got, want), window
        del spec


def test_a_view_is_not_kept_beyond_its_storage() -> None:
    case, backend = small_case(), cpu_backend("native")
    case.attend(backend, scale=1.0)
    keys = weakref.ref(case.view.k)
    assert keys() is not None
    del case
    gc.collect()
    assert keys() is None
