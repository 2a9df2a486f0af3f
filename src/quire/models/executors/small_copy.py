"""A small copy of a model: its class and kinds of layers, in float32, with few random weights.

What a class does with positions, windows, scales and heads is in its code and its config, not in
its weights. In 16 bits rounding hides an error in it; a long window hides it for as many tokens. In
a small copy every window is short and float32 shows any difference, so a way of running the model
is tried with the copy too (``trial``).

Widths, the vocabulary and the number of layers are cut; heads keep their width and how many of them
share keys. Windows and chunks are shortened by one number each in the copy's config and in its spec
alike, so that a spec that does not say what the model does goes on not to.
"""

import copy
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from quire.models.cache_argument import cache_argument
from quire.models.loader import LoadedModel
from quire.spec import ChunkedAttention, FullAttention, LayerSpec, ModelSpec, SlidingWindow
from quire.units import ceil_div

_OWN_CACHE_APART = 1e-3  # as chunks of scans are

log = logging.getLogger(__name__)

_HAS_HEADS = FullAttention | SlidingWindow | ChunkedAttention

_VOCAB = 97
_WIDTH = 64
_KV_HEADS = 2
_WINDOW = 9  # of the shortest; every other length of a window is one longer than the last
# Wide enough that attention looks at some tokens more than at others: only then a scale is seen.
_GAIN = 1.6
_MOST_PARAMETERS = 50_000_000  # one that stays larger is not worth its time

# Widths of what is between attentions, whatever a config calls them.
_INNER = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("shared_intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff"),
    *("ffn_hidden_size", "n_inner", "intermediate_size_mlp", "expert_ffn_hidden_size"),
    *("hidden_size_per_layer_input", "ffn_intermediate_size"),
)
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")


def small_copy(loaded: LoadedModel) -> LoadedModel | None:
    """Make the copy, on the model's device, with a spec cut as its config was; or None.

    The log says why none can be made. The caller's random numbers are left as they were.
    """
    reason = ""
    for cuts in _CUTS:
        try:
            return _cut(loaded, cuts)
        except Exception as error:  # of a config or a class that takes no such sizes: many kinds
            reason = f"{type(error).__name__}: {error}"
    reason = " ".join(reason.split())[:200]
    log.info("%s has no small copy to be tried with (%s)", loaded.name, reason)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cuts:
    """What is cut besides inner widths, the vocabulary and the number of layers."""

    heads: bool
    width: Literal["small", "of heads", "whole"]  # of hidden states


# In the order of what they leave. Some classes divide the hidden width by the number of heads, or
# want it to be their product; some give each layer heads of its own.
_CUTS = (
    _Cuts(heads=True, width="small"),
    _Cuts(heads=True, width="of heads"),
    _Cuts(heads=False, width="small"),
    _Cuts(heads=False, width="whole"),
)


class _Unlike(ValueError):
    """What was cut is not of the kind that was wanted."""


def _cut(loaded: LoadedModel, cuts: _Cuts) -> LoadedModel:
    """Raises: whatever the class does for sizes that it does not take; _Unlike."""
    config = copy.deepcopy(loaded.model.config)
    whole = _spec_of(config)
    cut = _SpecCut(whole, cuts)
    _cut_config(config.get_text_config(decoder=True), whole, cut)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    if _spec_of(config).layers != cut(whole).layers:
        raise _Unlike("its layers follow from sizes that are cut")
    if _num_parameters(loaded.model) > _MOST_PARAMETERS:  # else its copy has fewer
        _refuse_large(type(loaded.model), config)
    model = _random(type(loaded.model), config, loaded.device)
    _require_whole(model, cut.num_layers)
    return LoadedModel(
        name=f"a small copy of {loaded.name}",
        model=model,
        tokenizer=None,
        spec=replace(cut(loaded.spec), dtype="float32").computed_in("float32"),
    )


class _SpecCut:
    """Makes of a spec that of the copy. What a spec has otherwise than the config, it keeps."""

    def __init__(self, whole: ModelSpec, cuts: _Cuts) -> None:
        self.cuts = cuts
        self.num_layers = _layers_of_every_kind(whole)
        kept = [kept for layer in whole.layers for kept in layer.specs]
        reaches = sorted({r for spec in kept if (r := _reach(spec)) is not None})
        # Each length of a window → by how much it is shortened, so that all stay different.
        self.shorter = {r: max(0, r - short) for r, short in zip(reaches, count(_WINDOW))}
        heads = {s.num_kv_heads for s in kept if isinstance(s, _HAS_HEADS)}
        self.kv_heads = heads.pop() if len(heads) == 1 else 0
        if cuts.heads and heads and self.kv_heads < _KV_HEADS:
            raise _Unlike("its layers have heads that cannot be fewer")

    def __call__(self, spec: ModelSpec) -> ModelSpec:
        layers = tuple(
            replace(layer, specs=tuple(map(self._kept, layer.specs)))
            for layer in spec.layers[: self.num_layers]
        )
        return replace(spec, layers=layers)

    def _kept(self, kept: LayerSpec) -> LayerSpec:
        if isinstance(kept, SlidingWindow):
            kept = replace(kept, window=self._short(kept.window))
        elif isinstance(kept, ChunkedAttention):
            kept = replace(kept, chunk=self._short(kept.chunk))
        if isinstance(kept, _HAS_HEADS) and self.cuts.heads:
            kept = replace(kept, num_kv_heads=kept.num_kv_heads - self.kv_heads + _KV_HEADS)
        return kept

    def _short(self, length: int) -> int:
        """Shorter by as much as the config's next one is."""
        nearest = min(self.shorter, key=lambda known: abs(known - length), default=length)
        return max(1, length - self.shorter.get(nearest, 0))


def _spec_of(config: PreTrainedConfig) -> ModelSpec:
    return ModelSpec.from_config(config.to_dict(), "its config").computed_in("float32")


def _layers_of_every_kind(spec: ModelSpec) -> int:
    """The fewest first layers that have one of each kind that there is; two where there are two."""
    first: dict[object, int] = {}
    for number, layer in enumerate(spec.layers):
        first.setdefault((layer.specs, layer.shares_with is not None), number)
    return min(len(spec.layers), max(2, 1 + max(first.values(), default=0)))


def _reach(spec: LayerSpec) -> int | None:
    """Tokens that it reaches back, where that has an end."""
    match spec:
        case SlidingWindow():
            return spec.window
        case ChunkedAttention():
            return spec.chunk
        case _:
            return None


def _cut_config(text: PreTrainedConfig, whole: ModelSpec, cut: _SpecCut) -> None:
    for name, value in [*vars(text).items()]:
        if isinstance(value, list | tuple) and len(value) == len(whole.layers):
            setattr(text, name, type(value)(value[: cut.num_layers]))
        elif type(value) is int and value in cut.shorter and ("window" in name or "chunk" in name):
            setattr(text, name, value - cut.shorter[value])
    for name in _numbers(text, _INNER):
        setattr(text, name, min(getattr(text, name), _WIDTH))
    for name in _numbers(text, _VOCABULARIES):
        setattr(text, name, min(getattr(text, name), _VOCAB))
    for name in _numbers(text, _LAYERS):
        setattr(text, name, cut.num_layers)
    for name in _SPECIAL:
        value = getattr(text, name, None)
        if value is not None:
            several = isinstance(value, list)
            setattr(text, name, [i % _VOCAB for i in value] if several else value % _VOCAB)
    _cut_width(text, cut)


def _cut_width(text: PreTrainedConfig, cut: _SpecCut) -> None:
    """Hidden states and heads: as many queries to a key as there were, each as wide as it was."""
    heads, hidden = [*_numbers(text, _HEADS)], [*_numbers(text, _HIDDEN)]
    if cut.cuts.width == "whole" or not heads or not hidden:
        return
    num_heads, width = getattr(text, heads[0]), getattr(text, hidden[0])
    head_dim = next((getattr(text, name) for name in _numbers(text, ("head_dim",))), None)
    if cut.cuts.heads:
        head_dim = head_dim or width // num_heads
        num_heads = num_heads // (cut.kv_heads or num_heads) * _KV_HEADS  # latents serve all heads
        for name in heads:
            setattr(text, name, num_heads)
        for name in _numbers(text, ("num_key_value_heads", "num_kv_heads")):
            setattr(text, name, _KV_HEADS)
    if cut.cuts.width == "of heads":
        assert head_dim is not None
        width = num_heads * head_dim
    else:
        width = min(width, 2 * num_heads * ceil_div(_WIDTH, 2 * num_heads))
    for name in hidden:
        setattr(text, name, width)


def _numbers(config: PreTrainedConfig, names: tuple[str, ...]) -> Iterator[str]:
    """Those that the config has, as whole numbers. Some have one a layer, and refuse to say it."""
    for name in names:
        try:
            value = getattr(config, name, None)
        except RuntimeError:
            continue
        if type(value) is int:
            yield name


def _require_whole(model: PreTrainedModel, num_layers: int) -> None:
    """Raises: _Unlike for a copy that does not go on by its own cache as it does without one.

    Its sizes do not fit together, then, or it says nothing that another way could be held against.
    """
    vocab_size = model.get_input_embeddings().weight.shape[0]
    ids = (3 + 7 * torch.arange(4 * _WINDOW, device=model.device))[None] % vocab_size
    begun = 2 * _WINDOW
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        whole = model(input_ids=ids, use_cache=False).logits
        name = cache_argument(model.forward)
        parts = [
            model(input_ids=part, use_cache=True, **{name: cache}).logits
            for part in (ids[:, :begun], ids[:, begun:])
        ]
    apart = (torch.cat(parts, 1) - whole).abs().max() / whole.abs().max()
    if not apart <= _OWN_CACHE_APART:
        raise _Unlike(f"by its own cache it gives other logits, {apart:.0e} of the largest apart")
    if len(cache.layers) != num_layers:
        raise _Unlike(f"its own cache has {len(cache.layers)} layers, and {num_layers} were wanted")


def _num_parameters(model: PreTrainedModel) -> int:
    return sum(each.numel() for each in model.parameters())


def _refuse_large(kind: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Raises: _Unlike for what has too many parameters."""
    with torch.device("meta"):
        num_parameters = _num_parameters(kind(config))
    if num_parameters > _MOST_PARAMETERS:
        raise _Unlike(f"the smallest has {num_parameters:,} parameters")


def _random(
    kind: type[PreTrainedModel], config: PreTrainedConfig, device: torch.device
) -> PreTrainedModel:
    """A model of random weights in float32, ready to be asked."""
    with torch.random.fork_rng(devices=[]):  # weights are drawn at once, and below again
        model = kind(config).eval().float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                std = _GAIN / parameter.shape[-1] ** 0.5
                parameter.normal_(0, std, generator=generator)
            else:  # gains stay near one; biases and sinks come to say something
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise, alpha=0.05)
    return model.to(device)
