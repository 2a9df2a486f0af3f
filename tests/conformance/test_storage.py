"""Every strategy end to end: random use with bytes, over pages that are checked and counted.

Each token's keys and values are *canaries*, made from its unique id, the layer and the head: what
is read must be what was written for exactly that token of that sequence, layer and head, to the bit
of its rounding where it is kept in eight. A page is 4096 bytes as on the machine, heads are so wide
that a few tokens fill one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

import target
from conformance import named
from conformance.covering import only
from conformance.strategy_cases import OPTIONS, layers_of, model_spec
from conformance.strategy_machine import Ids, SlotStore, StrategyMachine, is_state
from memory.cuda.emulator import TENSOR_DEVICE, EmulatedDriver
from quire.errors import MemoryUnavailable
from quire.kv import (
    Accounting,
    CacheConfig,
    Commit,
    EntryWriter,
    Fits,
    LayerView,
    StorageOp,
    Usage,
    build_accounting,
    build_storage,
)
from quire.kv.layout import attention_spec
from quire.kv.storage.entries import dequantize, quantize
from quire.memory import CheckedMemory, FailingMemory, HostMemory, MemoryProvider
from quire.memory.cuda import CudaMemory, CudaRegion
from quire.memory.host.heaps import HeapRegion
from quire.memory.machine.probe import resident_bytes
from quire.memory.provider_wrappers import CheckedRegion
from quire.spec import ModelSpec
from quire.spec.layer_specs import dtype_bytes

SETTINGS = settings(max_examples=2, stateful_step_count=25, deadline=None)
MORE = settings(SETTINGS, max_examples=9)
DTYPES = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")


class RegionsInView:
    """A provider that remembers its regions, so that the kernel can be asked about them."""

    def __init__(self, upstream: MemoryProvider) -> None:
        self.regions: list[CheckedRegion] = []
        self._upstream = CheckedMemory(upstream)

    @property
    def page_bytes(self) -> int:
        return self._upstream.page_bytes

    @property
    def cannot_share(self) -> str | None:
        return self._upstream.cannot_share

    def used_on(self, stream: int, *, ends: bool = False) -> None:
        self._upstream.used_on(stream, ends=ends)

    def reserve(self, nbytes: int, *, heap_bytes: int | None = None) -> CheckedRegion:
        self.regions.append(self._upstream.reserve(nbytes, heap_bytes=heap_bytes))
        return self.regions[-1]

    def resident_bytes(self) -> int | None:
        """Bytes that the kernel has backed; None if it does not say."""
        counts = [_backed_bytes(region) for region in self.regions]
        return sum(count for count in counts if count is not None) if None not in counts else None


def _backed_bytes(region: CheckedRegion) -> int | None:
    inner: Any = region
    while hasattr(inner, "_upstream"):
        inner = inner._upstream
    if isinstance(inner, CudaRegion):
        return int(inner.committed_bytes)  # what is physical, the emulator's own tests count
    if isinstance(inner, HeapRegion):
        return inner.backed_bytes()
    return resident_bytes(region.tensor(torch.uint8).data_ptr(), region.nbytes)


def canary(ids: Tensor, layer: int, heads: int, width: int, salt: int) -> Tensor:
    """i64[T] → [T, heads, width], whole numbers below 251, which 16 bits can hold."""
    head = torch.arange(heads, device=ids.device)[:, None] * 17
    place = torch.arange(width, device=ids.device)
    # Even places tell ids apart that are near, odd ones those that are far.
    parts = torch.where(place % 2 == 0, ids[:, None, None], ids[:, None, None] // 251)
    return (parts + head + place + 29 * layer + salt) % 251


def there(x: Ids) -> Tensor:
    """On the device of this run."""
    return torch.from_numpy(x).to(target.device())


class TensorStore:
    """The machine's token ids as keys and values in a strategy's storage."""

    def __init__(
        self,
        strategy: str,
        accounting: Accounting,
        config: CacheConfig,
        upstream: MemoryProvider | None = None,
    ) -> None:
        self.provider = RegionsInView(upstream or HostMemory())
        self.accounting = accounting
        self.storage = build_storage(strategy, accounting, self.provider)
        self.replayed = SlotStore(accounting, config.capacity_bytes)

    @property
    def committed_bytes(self) -> int:
        return self.storage.memory.committed_bytes

    def apply(self, changes: Sequence[StorageOp]) -> None:
        self.replayed.apply(changes)
        self.storage.apply(changes)

    def lies(self, group: int, slots: Ids) -> Ids:
        return self.replayed.lies(group, slots)

    def write(self, group: int, slots: Ids, ids: Ids) -> None:
        self.replayed.write(group, slots, ids)
        if is_state(self.accounting.groups[group]):
            for _, tensor, want in self.states(group, ids):
                tensor[there(slots)] = want
            return
        for layer in self.accounting.groups[group].layers:
            k, v = self.entries(group, layer, ids)
            self.storage.write(layer, there(slots), k, v)

    def read(self, group: int, table: Ids, slots: Ids, start: int, expected: Ids) -> None:
        if not len(expected):
            return
        if is_state(self.accounting.groups[group]):
            for layer, tensor, want in self.states(group, expected):
                found = tensor[there(slots)]
                assert torch.equal(found, want), f"the state of layer {layer} is lost"
            return
        size = self.accounting.block_size(group)
        positions = there(np.arange(start, start + len(expected)))
        rows = there(table)[positions // size]
        for layer in self.accounting.groups[group].layers:
            view = self.storage.view(layer)
            seen = ((view.k, view.k_scale), (view.v, view.v_scale))
            written = self.entries(group, layer, expected)
            gathered = self.storage.gather(layer, there(slots))
            for entries, got, (every, scales) in zip(written, gathered, seen, strict=True):
                want = dequantize(*quantize(entries, every.dtype))
                assert torch.equal(got.transpose(0, 1), want)
                assert every.shape[1:] == (want.shape[1], size, want.shape[2])
                index = (rows, slice(None), positions % size)
                found = dequantize(every[index], None if scales is None else scales[index])
                assert torch.equal(found, want)

    def verify(self, usage: Usage) -> None:
        memory = self.storage.memory
        assert memory.committed_bytes == usage.committed_bytes
        assert memory.reserved_bytes == usage.reserved_bytes
        assert memory.peak_committed_bytes == self.replayed.peak_committed_bytes
        assert self.provider.resident_bytes() in (usage.committed_bytes, None)
        for region in self.provider.regions:
            region.check()

    def resize(self, capacity_bytes: int) -> None:
        self.replayed.resize(capacity_bytes)

    def close(self) -> None:
        assert self.provider.resident_bytes() in (0, None)
        self.storage.close()
        assert self.storage.memory.reserved_bytes == 0

    def states(self, group: int, ids: Ids) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each layer's tensors, and what the states of these tokens are in them."""
        for layer in self.accounting.groups[group].layers:
            for number, tensor in enumerate(self.storage.states(group).layer(layer)):
                shape = (len(ids), 1, tensor[0].numel())
                want = canary(there(ids), layer, 1, shape[2], salt=50 * number)
                yield layer, tensor, want.view(-1, *tensor.shape[1:]).to(tensor.dtype)

    def entries(self, group: int, layer: int, ids: Ids) -> tuple[Tensor, Tensor]:
        spec = attention_spec(self.accounting.groups[group])
        (heads, key_width), (_, value_width) = spec.entry_shapes
        tokens = there(ids)
        k = canary(tokens, layer, heads, key_width, salt=0)
        v = canary(tokens, layer, heads, value_width, salt=101)
        if dtype_bytes(spec.dtype) > 1:
            dtype = getattr(torch, spec.dtype)
            return k.to(dtype), v.to(dtype)
        # So that scales differ as well, from token to token, head to head, key to value.
        size = (
            2.0 ** -((tokens[:, None] + torch.arange(heads, device=tokens.device)) % 5)[..., None]
        )
        return (k * size).bfloat16(), (v * size / 3).bfloat16()


# Each way in which bytes lie, and are moved; the others differ in what fits.
_SAMPLED = named.sampled(
    "contiguous-request-defrag", "contiguous-stacks", "growing-staggered-kept", "growing-stacks",
    "paged-4", "virtual", "virtual-stacks-2", "virtual-shared-auto",
)  # fmt: skip


@pytest.mark.parametrize("option", only(OPTIONS, *_SAMPLED))
def test_random_use(option: str) -> None:
    use_at_random(option, SETTINGS)


@pytest.mark.full
@pytest.mark.parametrize("option", OPTIONS)
def test_more_random_use(option: str) -> None:
    use_at_random(option, MORE)


def use_at_random(option: str, asked: settings) -> None:
    strategy, _ = OPTIONS[option]
    page_bytes = HostMemory().page_bytes
    run_state_machine_as_test(
        lambda: StrategyMachine(
            option,
            lambda accounting, config: TensorStore(strategy, accounting, config),
            page_bytes=page_bytes,
            dtypes=DTYPES,
            wide=True,
        ),
        settings=asked,
    )


@pytest.mark.parametrize(
    "option", only(["contiguous", "paged-16", "virtual", "virtual-shared"], "virtual-shared")
)
def test_random_use_on_emulated_cuda(option: str) -> None:
    """Memory of a device, by its driver's rules: whatever breaks one raises."""
    strategy, _ = OPTIONS[option]

    def store(accounting: Accounting, config: CacheConfig) -> TensorStore:
        memory = CudaMemory(
            driver=EmulatedDriver(granularity=PAGE), tensor_device=TENSOR_DEVICE, keep_bytes=0
        )
        return TensorStore(strategy, accounting, config, memory)

    run_state_machine_as_test(
        lambda: StrategyMachine(option, store, page_bytes=PAGE, wide=True),
        settings=settings(SETTINGS, max_examples=2),
    )


@pytest.mark.gpu(emulated=True)
@pytest.mark.parametrize("option", OPTIONS)
def test_random_use_on_a_gpu(option: str) -> None:
    """The real driver's pages, which the storage takes and gives back; canaries on the device."""
    strategy, _ = OPTIONS[option]
    page_bytes = target.memory().page_bytes

    def store(accounting: Accounting, config: CacheConfig) -> TensorStore:
        return TensorStore(strategy, accounting, config, target.memory())

    run_state_machine_as_test(
        lambda: StrategyMachine(option, store, page_bytes=page_bytes, wide=True),
        settings=settings(SETTINGS, max_examples=2),
    )


PAGE = HostMemory().page_bytes
SPECS = {
    dtype: model_spec(layers_of("full+sliding", dtype, wide=True))
    for dtype in ("bfloat16", "int8", "float8_e4m3fn")
}
SPEC = SPECS["bfloat16"]
CONFIG = CacheConfig(max_model_len=64, max_num_seqs=4, capacity_bytes=2**23, page_bytes=PAGE)


def changes_of(accounting: Accounting) -> list[StorageOp]:
    """Two sequences that grow, a fork that is written to: commits, copies and releases."""
    changes: list[StorageOp] = []
    for seq_id in (0, 1):
        accounting.add(seq_id, max_tokens=40)
        assert isinstance(accounting.try_extend(seq_id, 30), Fits)
        changes += accounting.drain()
    assert isinstance(accounting.fork(0, 2), Fits)
    for num_tokens in (39, 40):
        assert isinstance(accounting.try_extend(2, num_tokens), Fits)
        changes += accounting.drain()
    accounting.free(1)
    return changes + accounting.drain()


@pytest.mark.parametrize("dtype", SPECS)
@pytest.mark.parametrize("option", OPTIONS)
def test_growing_and_forking_carry_all_of_an_entry(option: str, dtype: str) -> None:
    strategy, changed = OPTIONS[option]
    config = replace(CONFIG, **changed)
    accounting = build_accounting(strategy, SPECS[dtype], config)
    store = TensorStore(strategy, accounting, config)
    ids = np.arange(40)

    def extend(seq_id: int, start: int, stop: int) -> None:
        assert isinstance(accounting.try_extend(seq_id, stop), Fits)
        store.apply(accounting.drain())
        for group in range(len(accounting.groups)):
            store.write(group, accounting.slots(group, seq_id, start, stop), ids[start:stop])

    accounting.add(0)
    extend(0, 0, 7)
    extend(0, 7, 30)
    assert isinstance(accounting.fork(0, 1), Fits)
    store.apply(accounting.drain())
    extend(1, 30, 31)
    for seq_id, stop in ((0, 30), (1, 31)):
        for index, group in enumerate(accounting.groups):
            start = group.live_range(stop).start
            slots = accounting.slots(index, seq_id, start, stop)
            table = accounting.table(index, seq_id)
            store.read(index, table, slots, start, ids[start:stop])
        accounting.free(seq_id)
    store.apply(accounting.drain())
    store.close()


@pytest.mark.sampled(20)
@pytest.mark.parametrize("dtype", SPECS)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_refused_commit_leaves_no_layer_committed(option: str, dtype: str) -> None:
    strategy, changed = OPTIONS[option]
    failing = FailingMemory(HostMemory(), failing=())
    total = _apply_until_refused(strategy, changed, SPECS[dtype], failing)
    assert failing.num_commits > 1
    for number in range(1, failing.num_commits + 1, 3):
        failing = FailingMemory(HostMemory(), failing={number})
        assert _apply_until_refused(strategy, changed, SPECS[dtype], failing) < total


def _apply_until_refused(
    strategy: str, changed: Mapping[str, Any], spec: ModelSpec, provider: MemoryProvider
) -> int:
    """The number of changes that were carried out, each of them whole."""
    accounting = build_accounting(strategy, spec, replace(CONFIG, **changed))
    in_view = RegionsInView(provider)
    storage = build_storage(strategy, accounting, in_view)
    replayed = SlotStore(accounting, CONFIG.capacity_bytes)
    done = 0
    for change in changes_of(accounting):
        try:
            storage.apply([change])
        except MemoryUnavailable:
            break
        replayed.apply([change])
        done += 1
    assert storage.memory.committed_bytes == replayed.committed_bytes
    assert in_view.resident_bytes() in (replayed.committed_bytes, None)
    storage.close()
    assert storage.memory.committed_bytes == storage.memory.reserved_bytes == 0
    return done


@pytest.mark.parametrize("dtype", SPECS)
@pytest.mark.parametrize("option", OPTIONS)
def test_closing_gives_every_page_back(option: str, dtype: str) -> None:
    strategy, changed = OPTIONS[option]
    accounting = build_accounting(strategy, SPECS[dtype], replace(CONFIG, **changed))
    provider = RegionsInView(HostMemory())
    storage = build_storage(strategy, accounting, provider)
    storage.apply(changes_of(accounting))
    k, _ = storage.gather(0, torch.from_numpy(accounting.slots(0, 0, 0, 30)))
    tensors = [region.tensor(torch.uint8) for region in provider.regions]

    storage.close()
    assert storage.memory.committed_bytes == storage.memory.reserved_bytes == 0
    for flat in tensors:
        assert resident_bytes(flat.data_ptr(), flat.numel()) in (0, None)
    assert k.shape[1] == 30  # a copy, which outlives the storage
    storage.close()


@pytest.mark.parametrize("strategy", named.strategies())
def test_a_storage_for_nothing_can_be_built(strategy: str) -> None:
    """The verdict on the first token says why nothing fits; building must not fail before."""
    accounting = build_accounting(strategy, SPEC, replace(CONFIG, capacity_bytes=0))
    storage = build_storage(strategy, accounting, HostMemory())
    assert storage.view(0).k.shape[2] == accounting.block_size(0)
    assert storage.memory.committed_bytes == 0
    storage.close()


@pytest.mark.parametrize("strategy", named.strategies())
def test_a_writer_is_made_once_a_layer_and_writes_instead_of_torch(strategy: str) -> None:
    made: list[LayerView] = []
    written: list[tuple[int, list[int]]] = []

    def make_writer(view: LayerView) -> EntryWriter:
        made.append(view)
        layer = len(made) - 1
        return lambda slots, k, v: written.append((layer, slots.tolist()))

    accounting = build_accounting(strategy, SPEC, CONFIG)
    storage = build_storage(strategy, accounting, HostMemory(), make_writer)
    layers = [layer for group in accounting.groups for layer in group.layers]
    assert [view is storage.view(layer) for view, layer in zip(made, layers, strict=True)]
    entries = torch.zeros(2, 2, 256, dtype=torch.bfloat16)
    storage.write(layers[-1], torch.tensor([3, 5]), entries, entries)
    assert written == [(len(layers) - 1, [3, 5])]
    storage.close()


@pytest.mark.parametrize("dtype", SPECS)
@pytest.mark.parametrize("strategy", named.strategies())
def test_a_slot_has_its_address_in_the_view(strategy: str, dtype: str) -> None:
    """What a compiled writer goes by: the strides of the view, beyond its last row too."""
    accounting = build_accounting(strategy, SPECS[dtype], CONFIG)
    storage = build_storage(strategy, accounting, HostMemory())
    slots = torch.tensor([0, 17, accounting.num_slots(0) - 1])
    storage.apply([Commit(0, 0, accounting.num_slots(0))])
    generator = torch.Generator().manual_seed(0)
    heads, dim = SPECS[dtype].layers[0].specs[0].entry_shapes[0]
    k, v = torch.randn(2, 3, heads, dim, generator=generator).bfloat16()
    storage.write(0, slots, k, v)
    view = storage.view(0)
    for codes, scales, x in ((view.k, view.k_scale, k), (view.v, view.v_scale, v)):
        want = quantize(x, codes.dtype)
        assert torch.equal(by_strides(codes, slots, view.slots_per_row), want[0])
        assert (scales is None) == (want[1] is None) == (dtype != "int8")
        if scales is not None and want[1] is not None:
            assert scales.untyped_storage().data_ptr() == codes.untyped_storage().data_ptr()
            assert torch.equal(by_strides(scales, slots, view.slots_per_row), want[1])
    storage.close()


def by_strides(part: Tensor, slots: Tensor, slots_per_row: int) -> Tensor:
    """[N, K, B, …] → what lies in these slots: [T, K, …]."""
    row, head, entry, *_ = part.stride()
    flat = part.as_strided((part.untyped_storage().nbytes() // part.itemsize,), (1,), 0)
    first = slots // slots_per_row * row + slots % slots_per_row * entry + part.storage_offset()
    index = first[:, None] + torch.arange(part.shape[1]) * head
    for size, stride in zip(part.shape[3:], part.stride()[3:], strict=True):
        index = index[..., None] + torch.arange(size) * stride
    return flat[index]


def test_a_range_may_begin_anywhere_in_the_arena() -> None:
    """A view is as long as the longest sequence, wherever a shorter range of the arena begins."""
    config = replace(CONFIG, reserve="request", capacity_bytes=SPEC.bytes_per_token * 32)
    accounting = build_accounting("contiguous", SPEC, config)
    storage = build_storage("contiguous", accounting, HostMemory())
    for seq_id in (0, 1):
        accounting.add(seq_id, max_tokens=16)
        assert isinstance(accounting.try_extend(seq_id, 16), Fits)
    storage.apply(accounting.drain())
    (start,) = accounting.table(0, 1)
    assert storage.view(0).k[start].shape == (2, config.max_model_len, 256)
    storage.close()
