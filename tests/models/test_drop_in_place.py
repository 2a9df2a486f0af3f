"""Attention in a drop-in cache's blocks: the same numbers, and nothing gathered for them."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import DynamicCache

from conformance.covering import in_turn
from quire.errors import ConfigError
from quire.kv import STRATEGIES
from quire.memory.machine import machine_state as snapshot
from quire.models.drop_in import cache
from quire.models.drop_in.in_place import Unread
from quire.models.drop_in.rows import BatchRows
from tiny import WINDOW, tiny_model, tokens

OPTIONS: dict[str, Any] = dict(
    max_model_len=64, kv_cache_memory_bytes="8MB", block_size=4, growth_tokens=8
)
HEADS, KV_HEADS, WIDTH = 4, 2, 16  # of the tiny Llama and Gemma


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    """As ``generate`` runs: with gradients a cache gives copies."""
    with torch.no_grad():
        yield


@contextmanager
def counted_gathers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Layers whose keys and values were asked for as tensors with elements."""
    layers: list[int] = []
    own = BatchRows.read

    def read(self: BatchRows, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        layers.append(layer)
        return own(self, layer, start, stop)

    with monkeypatch.context() as patched:
        patched.setattr(BatchRows, "read", read)
        yield layers


def generate(kept: Any, ids: Tensor, mask: Tensor, name: str = "llama", **mode: Any) -> Tensor:
    model = tiny_model(name)
    given = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0) | mode
    result: Tensor = model.generate(ids, attention_mask=mask, past_key_values=kept, **given)
    return result


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_decode_step_gathers_nothing(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are padded on the left too, and beams where blocks are shared."""
    model = tiny_model("llama")
    ids, mask = tokens(3, 11), torch.ones(3, 11, dtype=torch.long)
    mask[1, :5] = 0
    wanted = generate(DynamicCache(config=model.config), ids, mask)
    with cache(model, strategy, **OPTIONS) as kept, counted_gathers(monkeypatch) as gathered:
        prompt = generate(kept, ids, mask, max_new_tokens=1)
        after_prompt = len(gathered)
        assert after_prompt <= model.config.num_hidden_layers  # padded prompts are torch's
        kept.reset()
        gathered.clear()
        assert torch.equal(generate(kept, ids, mask), wanted)
        assert torch.equal(wanted[:, :12], prompt)
        assert len(gathered) == after_prompt
    whole = torch.ones_like(mask)
    with cache(model, strategy, **OPTIONS) as kept, counted_gathers(monkeypatch) as gathered:
        again = generate(kept, ids, whole)
        assert not gathered  # nor for a prompt without padding
    assert torch.equal(again, generate(DynamicCache(config=model.config), ids, whole))


def test_beams_read_shared_blocks_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    ids, mask = tokens(2, 11), torch.ones(2, 11, dtype=torch.long)
    wanted = generate(DynamicCache(config=model.config), ids, mask, num_beams=3)
    with cache(model, "paged", **OPTIONS) as kept, counted_gathers(monkeypatch) as gathered:
        assert torch.equal(generate(kept, ids, mask, num_beams=3), wanted)
        assert not gathered


class Steps:
    """A cache filled by random steps, and the same keys and values as plain tensors."""

    def __init__(self, strategy: str, name: str, num_rows: int) -> None:
        model = tiny_model(name)
        self.kept = cache(model, strategy, **OPTIONS)
        self.sliding = [layer.is_sliding for layer in self.kept.layers]
        self.plain: list[tuple[Tensor, Tensor]] = []
        self.num_rows = num_rows
        empty = torch.empty(num_rows, KV_HEADS, 0, WIDTH)
        self.plain = [(empty, empty)] * len(self.sliding)

    @property
    def num_tokens(self) -> int:
        return self.plain[0][0].shape[2]

    def update(self, layer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        new = torch.randn(2, self.num_rows, KV_HEADS, num_tokens, WIDTH)
        before = self.plain[layer]
        self.plain[layer] = tuple(torch.cat([a, b], 2) for a, b in zip(before, new, strict=True))
        k, v = self.kept.update(new[0], new[1], layer)
        return k, v

    def shown(self, layer: int, count: int) -> tuple[Tensor, Tensor]:
        return tuple(x[:, :, x.shape[2] - count :] for x in self.plain[layer])  # type: ignore


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "strategy"), in_turn(["llama", "gemma3"], [*STRATEGIES], each=2))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_torch_would_say(strategy: str, name: str, data: st.DataObject) -> None:
    """Under every mask: those that the kernel knows, and those that it leaves to torch."""
    torch.manual_seed(data.draw(st.integers(0, 99)))
    steps = Steps(strategy, name, data.draw(st.integers(1, 3)))
    for _ in range(data.draw(st.integers(1, 4))):
        num_queries = data.draw(st.integers(1, 7))
        form = data.draw(st.sampled_from(["none", "padded", "holes", "causal", "float"]))
        before = steps.num_tokens
        for layer in (0, 3):  # of Gemma 3: one with a window and one without
            k, v = steps.update(layer, num_queries)
            assert isinstance(k, Unread)
            count = k.shape[2]
            assert count == v.shape[-2]
            assert k.dtype == torch.float32
            plain = steps.shown(layer, count)
            queries, keys = (
                torch.arange(num_queries) + before,
                torch.arange(count) + (before + num_queries - count),
            )
            mask = keys <= queries[:, None]
            if steps.sliding[layer]:
                mask &= keys > queries[:, None] - WINDOW
            mask = mask[None, None].repeat(steps.num_rows, 1, 1, 1)
            options: dict[str, Any] = {}
            if form == "padded":
                pad = torch.randint(0, before + 1, (steps.num_rows,))
                pad = torch.minimum(pad, torch.tensor(before))
                mask &= keys >= pad[:, None, None, None]
            elif form == "holes" and count > 2:
                mask[..., count // 2] = False
            if form == "causal" and count == num_queries > 1:
                options = dict(is_causal=True)
            elif not (form == "none" and num_queries == 1):
                options = dict(attn_mask=mask.float().log() if form == "float" else mask)
            heads = HEADS if data.draw(st.booleans()) else KV_HEADS
            q = torch.randn(steps.num_rows, heads, num_queries, WIDTH)
            options["enable_gqa"] = heads > KV_HEADS
            got, wanted = sdpa(q, k, v, **options), sdpa(q, *plain, **options)
            assert type(got) is Tensor
            sees = torch.ones(num_queries, dtype=torch.bool) if "attn_mask" not in options else None
            if sees is None:
                allowed = mask.any(-1)[:, 0]  # a query with nothing to read says nothing
                got, wanted = (x.transpose(1, 2)[allowed] for x in (got, wanted))
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
        for layer in (1, 2):
            steps.update(layer, num_queries)
    steps.kept.close()


def test_one_mask_for_layers_of_two_kinds() -> None:
    """One that shows a layer with a window what lies behind that, too, as it shows the others."""
    torch.manual_seed(0)
    num_tokens = WINDOW + 5
    mask = torch.ones(1, 1, num_tokens, num_tokens, dtype=torch.bool).tril()
    q = torch.randn(1, HEADS, num_tokens, WIDTH)
    with cache(tiny_model("gemma3"), **OPTIONS) as kept:
        plain = [(torch.randn(1, KV_HEADS, num_tokens, WIDTH),) * 2 for _ in range(4)]
        unread = [kept.update(*pair, layer) for layer, pair in enumerate(plain)]
        for layer in (1, 0):  # of Gemma 3: one without a window and one with it
            got, wanted = (
                sdpa(q, *each[layer], attn_mask=mask, enable_gqa=True) for each in (unread, plain)
            )
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def test_queries_may_come_as_heads_that_share_a_key() -> None:
    """As Transformers packs them for a decode step under a mask."""
    steps = Steps("paged", "llama", 2)
    for layer in range(4):
        steps.update(layer, 9)
    k, v = steps.update(0, 1)
    mask = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    mask[1, ..., :3] = False
    q = torch.randn(2, KV_HEADS, HEADS // KV_HEADS, WIDTH)
    got = sdpa(q, k, v, attn_mask=mask)
    assert k._place._gathered is None
    torch.testing.assert_close(got, sdpa(q, *steps.plain[0], attn_mask=mask))
    steps.kept.close()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_other_operation_is_given_the_elements(strategy: str) -> None:
    steps = Steps(strategy, "llama", 2)
    k, v = steps.update(0, 5)
    plain_k, plain_v = steps.plain[0]
    assert k.shape == plain_k.shape
    assert k.size(-1) == WIDTH
    assert k.dim() == 4
    assert len(k) == 2
    assert k._place._gathered is None
    assert torch.equal(k, plain_k)
    assert torch.equal(plain_v, v)
    assert torch.equal(k[:, :, None], plain_k[:, :, None])
    assert torch.equal(torch.cat([k, v], -1), torch.cat([plain_k, plain_v], -1))
    scores = k @ v.transpose(2, 3)
    torch.testing.assert_close(scores, plain_k @ plain_v.transpose(2, 3))
    assert type(scores) is Tensor
    assert type(deepcopy(k)) is Tensor
    assert type(k.clone()) is Tensor
    assert torch.equal(torch.from_numpy(k.contiguous().numpy()), plain_k)
    assert float(k.max()) == float(plain_k.max())
    assert repr(k) == repr(plain_k)
    steps.kept.close()


@pytest.mark.parametrize("change", ["update", "reorder", "select", "crop", "reset"])
def test_what_is_held_outlives_the_step(change: str) -> None:
    """Blocks may be given away then: what a caller still holds has been gathered before."""
    steps = Steps("paged", "llama", 2)
    k, v = steps.update(0, 6)
    for layer in (1, 2, 3):
        steps.update(layer, 6)
    wanted = [x.clone() for x in steps.plain[0]]
    if change == "update":
        steps.update(0, 3)
    elif change == "reorder":
        steps.kept.reorder_cache(torch.tensor([1, 1]))
    elif change == "select":
        steps.kept.batch_select_indices(torch.tensor([1]))
    elif change == "crop":
        steps.kept.crop(-4)
    else:
        steps.kept.reset()
    if change not in ("update", "reset"):
        rows = len(steps.kept.rows or ())
        for layer in range(4):
            steps.kept.update(*torch.zeros(2, rows, KV_HEADS, 5, WIDTH), layer)
    assert torch.equal(k, wanted[0])
    assert torch.equal(v, wanted[1])
    steps.kept.close()


def test_who_attends_otherwise_is_given_plain_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    new = torch.randn(2, 1, KV_HEADS, 5, WIDTH)
    with cache(model, "paged", attention_backend="sdpa", **OPTIONS) as kept:
        assert type(kept.update(*new, 0)[0]) is Tensor
    with cache(model, "paged", attention_backend="cpu", **OPTIONS) as kept:
        assert type(kept.update(*new, 0)[0]) is Unread
    model.set_attn_implementation("eager")
    ids, mask = tokens(2, 11), torch.ones(2, 11, dtype=torch.long)
    given = dict(max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    wanted = model.generate(ids, attention_mask=mask, **given)
    with cache(model, "paged", **OPTIONS) as kept:
        got = model.generate(ids, attention_mask=mask, past_key_values=kept, **given)
        assert torch.equal(got, wanted)
        assert type(kept.update(*torch.randn(2, 2, KV_HEADS, 1, WIDTH), 0)[0]) is Tensor
    with pytest.raises(ConfigError, match=r"attention_backend='flash'.* known: auto, "):
        cache(model, attention_backend="flash")


def test_to_make_a_cache_counts_no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process has is counted page by page: tens of milliseconds where there are many."""

    def counted(*_: Any) -> None:
        raise AssertionError("the pages of this process were counted")

    for name in ("process_memory", "num_mappings", "numa_nodes"):
        monkeypatch.setattr(snapshot, name, counted)
    for asked in (None, "8MB"):
        cache(tiny_model("llama"), kv_cache_memory_bytes=asked).close()
    with pytest.raises(ConfigError, match="more than the machine has"):
        cache(tiny_model("llama"), kv_cache_memory_bytes="900TB")
