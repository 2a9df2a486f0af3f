"""Torch's attention of a long chunk: some queries at a time, which gives what one mask gives."""

from typing import Any

import pytest
import torch

from quire.attention import sdpa
from quire.attention.gather import readable
from quire.spec import ChunkedAttention, FullAttention, SlidingWindow
from quire.spec.layer_specs import LatentAttention

OWN: dict[str, Any] = dict(num_kv_heads=2, head_dim=8, dtype="float32")
SPECS = {
    "full": FullAttention(**OWN),
    "window": SlidingWindow(**OWN, window=11),
    "chunks": ChunkedAttention(**OWN, chunk=16),
    "latents": LatentAttention(latent_dim=6, rope_dim=2, dtype="float32"),
}
CPU = torch.device("cpu")


def inputs(spec: Any, sharing: int, num_queries: int, context_len: int) -> Any:
    torch.manual_seed(num_queries)
    start = spec.live_range(context_len - num_queries).start
    (kv_heads, _), _ = spec.entry_shapes
    q = torch.randn(num_queries, kv_heads * sharing, 8)
    k, v = (torch.randn(kv_heads, context_len - start, width) for width in (8, 6))
    return q, k, v, start


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("sharing", [1, 3])
@pytest.mark.parametrize("lengths", [(1, 40), (37, 37), (20, 53)])
@pytest.mark.parametrize("kind", SPECS)
def test_pieces_give_what_one_mask_gives(
    kind: str,
    lengths: tuple[int, int],
    sharing: int,
    written_out: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = SPECS[kind]
    q, k, v, start = inputs(spec, sharing, *lengths)
    sinks = torch.randn(q.shape[1]) if written_out else None
    options: dict[str, Any] = dict(scale=0.4, softcap=5.0 if written_out else None, sinks=sinks)
    mask = readable(spec, *lengths, start, CPU)
    want = sdpa._attend(q, k, v, mask, **options)
    masks: list[int] = []

    def seen(*args: Any) -> Any:
        mask = readable(*args)
        masks.append(0 if mask is None else mask.numel() * sharing)
        return mask

    monkeypatch.setattr(sdpa, "readable", seen)
    for most in (1, 500, 2**24):
        monkeypatch.setattr(sdpa, "_MOST_ELEMENTS", most)
        masks.clear()
        got = sdpa.attend_sequence(q, k, v, spec, start, **options)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert all(size <= max(most, k.shape[1] * sharing) for size in masks)


def test_a_chunk_that_begins_a_sequence_has_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no heads are shared, as in a latent that was expanded."""
    monkeypatch.setattr(sdpa, "readable", None)
    q, k, v, start = inputs(SPECS["full"], 1, 37, 37)
    got = sdpa.attend_sequence(q, k, v, SPECS["full"], start, scale=0.4, softcap=None, sinks=None)
    mask = readable(SPECS["full"], 37, 37, 0, CPU)
    want = sdpa._attend(q, k, v, mask, scale=0.4, softcap=None, sinks=None)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
