"""Attention over latents as they are kept, where the model itself would expand them first.

A layer that keeps one latent c and one rotary key r a token makes, before it attends, a key
[Wk c, r] and a value Wv c of them for every head. The products can be taken elsewhere: since
q · Wk c = Wkᵀq · c and Σ p (Wv c) = Wv Σ p c, the query is multiplied by Wk before attention, the
result by Wv after it, and in between every head reads the same latent. Nothing is expanded: not
what came before, in every step again, nor what is new.

So ``expand_kv`` is exchanged, for one pass at a time, by one that expands nothing. Which part of
the module holds Wk and Wv is found by trial: what its own ``expand_kv`` makes of random latents
must be what the halves of that weight make of them. Where there is no such part, latents are
gathered and expanded (``gathered``). How attention reads latents, its backend knows.

Source: DeepSeek-V2 §2.1.2, "absorbed" projections.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quire.attention import AttentionBatch
from quire.kv import LayerView
from quire.layers.fused import (
    KeptParts,
    Slot,
    agrees,
    answer,
    is_plain,
    random_like,
    settings,
    slots_of,
)
from quire.spec import AttentionSpec, FullAttention, LatentAttention

# -- latent ----------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

_EXPAND = "expand_kv"
_TRIED_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AbsorbedLatent:
    """One layer's two products. They are of its own weight: there is no second copy."""

    module: nn.Module
    linear: (
        nn.Linear
    )  # its weight: for each head the rows of Wk, then those of Wv, [H (Dn + Dv), R]
    num_heads: int
    key_width: int  # Dn: of a key's part that is not rotary

    def queries(self, q: Tensor) -> Tensor:
        """Turn queries so that they meet latents: [T, H, Dn + rope] → [T, H, R + rope]."""
        own, rotary = q[..., : self.key_width], q[..., self.key_width :]
        met = torch.bmm(own.transpose(0, 1), self.halves[0])  # [H, T, Dn] · [H, Dn, R]
        return torch.cat([met.transpose(0, 1), rotary], -1)

    def results(self, out: Tensor) -> Tensor:
        """Turn sums of latents into values: [T, H, R] → [T, H, Dv]."""
        return torch.bmm(out.transpose(0, 1), self.halves[1].transpose(1, 2)).transpose(0, 1)

    def expand(self, latents: Tensor, rotary_keys: Tensor) -> tuple[Tensor, Tensor]:
        """Expand as the module does: [1, 1, n, R] and [1, 1, n, rope] → k, v [1, H, n, …]."""
        own = getattr(type(self.module), _EXPAND)  # the instance's is exchanged during a pass
        expanded: tuple[Tensor, Tensor] = own(self.module, latents, rotary_keys)
        return expanded

    @property
    def halves(self) -> tuple[Tensor, Tensor]:
        """[H, Dn, R] and [H, Dv, R], where the weight lies now."""
        weight = self.linear.weight
        heads = weight.view(self.num_heads, -1, weight.shape[1])
        return heads[:, : self.key_width], heads[:, self.key_width :]


class LatentLayers:
    """A model's layers that keep latents. Between two passes it is its owner's, as it was."""

    def __init__(self, model: nn.Module, latents: Mapping[int, LatentAttention]) -> None:
        self._found: dict[int, AbsorbedLatent] = {}
        self._refused = dict.fromkeys(latents, "no part of it expands latents")
        tried: dict[object, str | None] = {}
        for module in model.modules():
            layer = getattr(module, "layer_idx", None)
            if not isinstance(layer, int) or layer not in latents:
                continue
            if not callable(getattr(module, _EXPAND, None)):
                continue
            found = _find(module, latents[layer], tried)
            if isinstance(found, AbsorbedLatent):
                self._found[layer] = found
                del self._refused[layer]
            else:
                self._refused[layer] = found
        self._all_kept = _kept(self._found.values())
        self._kept = {layer: _kept([found]) for layer, found in self._found.items()}
        self._changed: set[int] = set()  # of which the log has spoken

    @property
    def layers(self) -> Collection[int]:
        """All that keep latents."""
        return self._found.keys() | self._refused.keys()

    @property
    def refused(self) -> Mapping[int, str]:
        """Layers whose latents have to be expanded, and why."""
        return self._refused

    @property
    def unchanged(self) -> bool:
        """Whether all that were found can be read so."""
        return self._all_kept.holds()

    @contextmanager
    def in_place(self) -> Iterator[Mapping[int, AbsorbedLatent]]:
        """Have these expand nothing, but for those that their owner has changed."""
        absorbed = self._now()
        own = [found.module.__dict__ for found in absorbed.values()]
        try:
            for attributes in own:
                attributes[_EXPAND] = _unexpanded
            yield absorbed
        finally:
            for attributes in own:
                attributes.pop(_EXPAND, None)

    def _now(self) -> dict[int, AbsorbedLatent]:
        """Those whose parts are still what they were."""
        if self.unchanged:
            return self._found
        left = {n: found for n, found in self._found.items() if self._kept[n].holds()}
        for layer in self._found.keys() - left.keys() - self._changed:
            log.info("layer %d is not what it was: its latents are expanded in every step", layer)
            self._changed.add(layer)
        return left


def _kept(several: Collection[AbsorbedLatent]) -> KeptParts:
    """What must still be there: linear layers and their weights, and no hook on them."""
    slots: list[Slot] = []
    for each in several:
        slots += slots_of(each.module._modules, each.linear._parameters)
        slots.append((each.module.__dict__, _EXPAND, None))
    return KeptParts(slots, [each.linear for each in several])


def _unexpanded(latents: Tensor, rotary_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Stands in for a module's own; attention reads them where they are kept."""
    return latents, rotary_keys


def _find(
    module: nn.Module, spec: LatentAttention, tried: dict[object, str | None]
) -> AbsorbedLatent | str:
    """The part that expands, or why there is none. One that is like another is not tried again."""
    if _EXPAND in module.__dict__:
        return f"{_EXPAND} has been exchanged by its owner"
    found: AbsorbedLatent | str = f"{type(module).__name__} has no linear layer that takes them"
    for name, linear in module.named_children():
        if getattr(linear, "in_features", 0) == spec.latent_dim:
            found = _try(name, module, linear, spec, tried)
            if isinstance(found, AbsorbedLatent):
                break
    return found


def _try(
    name: str,
    module: nn.Module,
    linear: nn.Module,
    spec: LatentAttention,
    tried: dict[object, str | None],
) -> AbsorbedLatent | str:
    """Whether that linear layer is what expands latents."""
    if type(linear) is not nn.Linear or is_traceable_wrapper_subclass(linear.weight):
        return f"the weight of its {name} is no plain matrix"
    weight = linear.weight
    if weight.is_meta or not weight.is_contiguous() or not is_plain(linear):
        return f"its {name} is elsewhere, or is called otherwise than torch does"
    if linear.bias is not None:
        return f"its {name} has a bias"
    widths = spec.latent_dim, spec.rope_dim
    latents, rotary = (random_like(weight, 1, 1, _TRIED_TOKENS, width) for width in widths)
    with torch.inference_mode():
        expanded = answer(getattr(module, _EXPAND), latents, rotary)
    if not isinstance(expanded, tuple) or [x.dim() for x in expanded] != [4, 4]:
        return f"its {_EXPAND} gives something else than keys and values"
    _, num_heads, _, key_width = expanded[0].shape
    absorbed = AbsorbedLatent(
        module=module,
        linear=linear,
        num_heads=num_heads,
        key_width=key_width - spec.rope_dim,
    )
    alike = name, type(module), _same_settings(module), weight.shape, weight.dtype
    if alike not in tried:
        tried[alike] = _differs(absorbed, latents, rotary, expanded)
    return tried[alike] or absorbed


def _differs(
    absorbed: AbsorbedLatent, latents: Tensor, rotary: Tensor, expanded: tuple[Tensor, Tensor]
) -> str | None:
    """How what the weight makes of latents [1, 1, n, R] is not what the module makes."""
    keys, values = expanded
    num_rows = absorbed.num_heads * (absorbed.key_width + values.shape[-1])
    if absorbed.key_width < 1 or absorbed.linear.weight.shape[0] != num_rows:
        return f"its {_EXPAND} does not use the whole of one matrix"
    key_half, value_half = (half.float().transpose(1, 2) for half in absorbed.halves)
    with torch.inference_mode():
        own = torch.matmul(latents[0].float(), key_half)
        want_keys = torch.cat([own, rotary[0].float().expand(absorbed.num_heads, -1, -1)], -1)
        want_values = torch.matmul(latents[0].float(), value_half)
    for got, want in ((keys, want_keys), (values, want_values)):
        if not agrees(got[0], want.to(got.dtype), of_sums=True):
            return f"its {_EXPAND} does not multiply by one matrix"
    return None


def _same_settings(module: nn.Module) -> object:
    return frozenset((name, value) for name, value in settings(module) if name != "layer_idx")


# -- latent read -----------------------------------------------------------------------------------

# How a step reads a latent layer: absorbed, but for long chunks that begin a sequence.
#
# Absorbed, each query meets latents, which are several times as wide as a head's own keys. That is
# little beside expanding what came before; a chunk of hundreds of tokens with nothing before it is
# done sooner on its own keys and values. They are as many as the step's tokens, made by the
# model's own ``expand_kv``, and gone with the layer: what came before is never expanded.
#
# Source: decision 21, where both are measured.


WORTH_EXPANDING = 129  # tokens of a chunk: more than a recorded pass has


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A step's sequences, by how they are read."""

    expanded: list[tuple[int, int, AttentionBatch]]  # first query, one past the last, by itself
    absorbed: AttentionBatch | None  # all the others
    queries: Tensor  # i64: theirs


def attend_latents(  # noqa: PLR0913
    q: Tensor,  # [T, H, Dn + rope]
    latents: Tensor,  # [1, 1, T, R]: the step's own
    rotary: Tensor,  # [1, 1, T, rope]
    absorbed: AbsorbedLatent,
    view: LayerView,
    batch: AttentionBatch,
    attend: Callable[..., Tensor],  # a backend's, with its scale
    attend_expanded: Callable[..., Tensor],  # the same, of what may be of another kind
    *,
    spec: AttentionSpec,
) -> Tensor:
    """Attend to latents: [T, H, Dv]."""

    def read(q: Tensor, batch: AttentionBatch) -> Tensor:
        return absorbed.results(attend(absorbed.queries(q), view, batch, spec=spec))

    # Where entries are rounded, what is read is what is kept.
    if len(q) < WORTH_EXPANDING or view.k.dtype != q.dtype:
        return read(q, batch)
    parts = batch.memo.get("latents")
    if parts is None:
        parts = batch.memo["latents"] = _split(batch, q.device)
    if not parts.expanded:
        return read(q, batch)
    out: Tensor | None = None
    for begin, end, alone in parts.expanded:
        k, v = absorbed.expand(latents[:, :, begin:end], rotary[:, :, begin:end])
        own = FullAttention(
            num_kv_heads=k.shape[1],
            head_dim=k.shape[-1],
            value_head_dim=v.shape[-1],
            dtype=spec.dtype,
        )
        row = LayerView(k=k, v=v, slots_per_row=1)
        part = attend_expanded(q[begin:end], row, alone, spec=own)
        if out is None:
            out = part.new_empty(*q.shape[:2], part.shape[-1])
        out[begin:end] = part
    assert out is not None
    if parts.absorbed is not None:
        out[parts.queries] = read(q[parts.queries], parts.absorbed)
    return out


def _split(batch: AttentionBatch, device: torch.device) -> _Parts:
    expanded: list[tuple[int, int, AttentionBatch]] = []
    others: list[int] = []
    queries: list[Tensor] = []
    for number, (begin, end, context_len) in enumerate(batch.chunks()):
        num_tokens = end - begin
        if num_tokens == context_len and num_tokens >= WORTH_EXPANDING:
            expanded.append((begin, end, _by_itself(num_tokens)))
        else:
            others.append(number)
            queries.append(torch.arange(begin, end))
    if not expanded or not others:
        return _Parts(expanded=expanded, absorbed=None, queries=torch.arange(0))
    lengths = np.diff(batch.query_starts)[others]
    rest = replace(
        batch,
        query_starts=np.concatenate([[0], lengths.cumsum()]).astype(np.int64),
        context_lens=batch.context_lens[others],
        tables=batch.tables[others],
        slots=batch.slots[torch.cat(queries)],
        memo={},
    )
    return _Parts(expanded=expanded, absorbed=rest, queries=torch.cat(queries).to(device))


def _by_itself(num_tokens: int) -> AttentionBatch:
    """A sequence that lies in one row."""
    return AttentionBatch(
        query_starts=np.array([0, num_tokens]),
        context_lens=np.array([num_tokens]),
        tables=torch.zeros(1, 1, dtype=torch.long),
        slots=torch.arange(num_tokens),
        block_size=num_tokens,
    )
