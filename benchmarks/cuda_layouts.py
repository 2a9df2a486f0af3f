"""Decode attention over keys and values in the driver's virtual memory, in several layouts.

One token is decoded for each of B sequences of T tokens, in all layers. A sequence's range holds
[streams, T, layers of the stream, 2, K, D]; the baseline is one tensor [L, 2, B, T, K, D]. Torch's
kernel is timed, and FlashAttention's and FlashInfer's where they are installed.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from quire.memory.cuda import CudaMemory
from quire.memory.cuda.packing import Packing
from quire.units import format_bytes

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
KeysValues = Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # of a layer, each [B, T, K, D]


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    num_layers: int = 36
    num_kv_heads: int = 8
    num_groups: int = 4  # query heads for each of them
    head_dim: int = 128

    @property
    def entry_bytes(self) -> int:
        return self.num_kv_heads * self.head_dim * 2

    @property
    def token_bytes(self) -> int:
        return self.num_layers * 2 * self.entry_bytes

    def packing(self, layers_per_page: int, page_bytes: int) -> Packing:
        return Packing(
            num_layers=self.num_layers,
            layers_per_page=layers_per_page,
            entry_bytes=self.entry_bytes,
            page_bytes=page_bytes,
        )


@contextmanager
def in_pages(
    memory: CudaMemory, geometry: Geometry, layers: int, num_seqs: int, num_tokens: int
) -> Iterator[KeysValues]:
    """Ranges of committed pages, ``layers`` of them a page."""
    shape = (layers, 2, geometry.num_kv_heads, geometry.head_dim)
    num_streams = geometry.num_layers // layers
    region = memory.reserve(num_seqs * num_tokens * geometry.token_bytes)
    region.commit(0, region.nbytes)
    flat = region.tensor(torch.bfloat16)
    flat.normal_()
    used = num_seqs * num_tokens * geometry.token_bytes // 2
    whole = flat[:used].view(num_seqs, num_streams, num_tokens, *shape)

    def keys_and_values(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        stream = whole[:, layer // layers, :, layer % layers]
        return stream[:, :, 0], stream[:, :, 1]

    try:
        yield keys_and_values
    finally:
        region.close()


@contextmanager
def in_one_tensor(
    device: str, geometry: Geometry, num_seqs: int, num_tokens: int
) -> Iterator[KeysValues]:
    shape = (geometry.num_layers, 2, num_seqs, num_tokens)
    whole = torch.empty(
        *shape, geometry.num_kv_heads, geometry.head_dim, dtype=torch.bfloat16, device=device
    ).normal_()
    yield lambda layer: (whole[layer, 0], whole[layer, 1])


def kernels() -> dict[str, Kernel]:
    """Torch's, and of the others those that are installed."""
    found: dict[str, Kernel] = {"sdpa": _sdpa}
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        pass
    else:
        found["flash-attn"] = lambda q, k, v, lengths: flash_attn_with_kvcache(
            q.flatten(1, 2)[:, None], k, v, cache_seqlens=lengths
        )
    try:
        import flashinfer
    except ImportError:
        pass
    else:
        found["flashinfer"] = lambda q, k, v, lengths: torch.stack(
            [
                flashinfer.single_decode_with_kv_cache(q[i].flatten(0, 1), k[i], v[i])
                for i in range(len(q))
            ]
        )
    return found


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The query heads of one KV head are rows, so that nothing is repeated."""
    return scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2))


def decode_ms(
    kernel: Kernel, entries: KeysValues, geometry: Geometry, num_seqs: int, num_tokens: int
) -> float:
    """Of one step through all layers; the best of three."""
    device = entries(0)[0].device
    heads = (geometry.num_kv_heads, geometry.num_groups, geometry.head_dim)
    q = torch.randn(num_seqs, *heads, dtype=torch.bfloat16, device=device)
    lengths = torch.full((num_seqs,), num_tokens, dtype=torch.int32, device=device)

    def step() -> None:
        for layer in range(geometry.num_layers):
            kernel(q, *entries(layer), lengths)

    def seconds() -> float:
        _wait(device)
        begun = time.perf_counter()
        step()
        _wait(device)
        return time.perf_counter() - begun

    step()
    return min(seconds() for _ in range(3)) * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare(
    memory: CudaMemory,
    device: str,
    geometry: Geometry,
    layouts: tuple[int, ...],
    grid: tuple[tuple[int, int], ...],
    num_rounds: int,
) -> Iterator[tuple[str, ...]]:
    """Rows: kernel, B, T, layout, median ms, GB/s, and the median of its ratio to the baseline.

    The layouts take turns. "one tensor, again" is the baseline once more: the noise.
    """
    plain = partial(in_one_tensor, device, geometry)
    makers = {"one tensor": plain}
    for layers in layouts:
        makers[f"{layers} layers a page"] = partial(in_pages, memory, geometry, layers)
    makers["one tensor, again"] = plain
    for name, kernel in kernels().items():
        for size in grid:
            needed = size[0] * size[1] * geometry.token_bytes
            where = (name, *map(str, size))
            free = torch.cuda.mem_get_info()[0] if device == "cuda" else 2**34
            if needed * 1.1 > free:
                yield *where, "skipped: it needs", format_bytes(needed), "", ""
                continue
            samples: dict[str, list[float]] = {layout: [] for layout in makers}
            for _ in range(num_rounds):
                for layout, make in makers.items():
                    with make(*size) as entries:
                        samples[layout].append(decode_ms(kernel, entries, geometry, *size))
                    if device == "cuda":
                        torch.cuda.empty_cache()
            for layout, taken in samples.items():
                pairs = zip(samples["one tensor"], taken, strict=True)
                ratio = statistics.median(base / ours for base, ours in pairs)
                ms = statistics.median(taken)
                yield *where, layout, f"{ms:.3f}", f"{needed / ms / 1e6:.0f}", f"{ratio:.3f}"
