"""Describe a model's KV memory: its layers, and the groups of layers with equal memory.

``ModelSpec.from_config`` reads any Hugging Face ``config.json``; it neither imports Transformers
nor loads weights. ``layer_specs`` counts a layer's bytes, and ``config_json`` reads the file.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.spec import config_json
from quire.spec.layer_specs import (
    IN_WEIGHTS_DTYPE,
    ChunkedAttention,
    Count,
    CrossAttention,
    KeptWhole,
    Layer,
    LayerSpec,
    RecurrentState,
    SlidingWindow,
    dtype_bytes,
)

__all__ = ["Group", "Layer", "ModelSpec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers with an equal spec: one block id names the same tokens in all of them."""

    spec: LayerSpec
    layers: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one more token in all layers, while no window passes any."""
        return self.num_layers * self.spec.bytes_per_token

    def live_start(self, num_tokens: Count) -> Count:
        """Return the first of ``num_tokens`` tokens that a later token can still read here."""
        return self.spec.live_start(num_tokens)

    def live_range(self, num_tokens: int) -> range:
        """Return the tokens that a later token can still read here."""
        return self.spec.live_range(num_tokens)

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes to keep in all layers once ``num_tokens`` are computed."""
        return self.num_layers * self.spec.bytes_for(num_tokens)

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block in all layers."""
        return self.num_layers * self.spec.block_bytes(block_size)

    def peak_bytes(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Return the most bytes held on the way to ``num_tokens``, in steps of ``step_tokens``."""
        if not isinstance(self.spec, SlidingWindow | ChunkedAttention):
            return self.bytes_for(num_tokens)  # it only grows, so the end is the peak
        return self.bytes_per_token * self.spec.peak_tokens(num_tokens, step_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The KV memory of a model."""

    model_type: str
    layers: tuple[Layer, ...]
    max_model_len: int  # tokens: the context that the model was made for
    dtype: str  # of the weights, and of keys and values by default

    @classmethod
    def from_config(cls, config: Mapping[str, Any], source: str = "config.json") -> "ModelSpec":
        """Read a parsed config.json; ``source`` is its name in error messages.

        Raises: ConfigError for a field that is missing or wrong; UnsupportedModel for a model whose
        memory is of no kind known here.
        """
        reading = config_json.read(config, source)
        return cls(
            model_type=reading.model_type,
            layers=reading.layers,
            max_model_len=reading.max_model_len,
            dtype=reading.dtype,
        )

    @classmethod
    def from_file(cls, path: str | Path) -> "ModelSpec":
        """Read a config.json, or that of a folder. Raises: as ``from_config``; ModelNotLoadable."""
        config, source = config_json.load(path)
        return cls.from_config(config, source)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return the groups of layers with equal specs, in the order of their first layer."""
        members: dict[LayerSpec, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for spec in layer.specs:
                members.setdefault(spec, []).append(index)
        return tuple(Group(spec=spec, layers=tuple(layers)) for spec, layers in members.items())

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one more token, while no window passes any."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers that keep a recurrent state."""
        return tuple(
            index
            for index, layer in enumerate(self.layers)
            if any(isinstance(kept, RecurrentState) for kept in layer.specs)
        )

    @property
    def source_tokens(self) -> int:
        """Return the tokens of the longest source of an encoder-decoder, or 0."""
        return max(
            (g.spec.source_tokens for g in self.groups if isinstance(g.spec, CrossAttention)),
            default=0,
        )

    @property
    def state_bytes(self) -> int:
        """Return the bytes that a sequence of any length takes: recurrent states and a source."""
        return sum(group.bytes_for(1) for group in self.groups if isinstance(group.spec, KeptWhole))

    def bytes_for(self, num_tokens: int) -> int:
        """Return the bytes to keep once ``num_tokens`` are computed and more may follow."""
        return sum(group.bytes_for(num_tokens) for group in self.groups)

    def peak_bytes(self, num_tokens: int, step_tokens: int = 1) -> int:
        """Return the most bytes held on the way to ``num_tokens``, in steps of ``step_tokens``."""
        return sum(group.peak_bytes(num_tokens, step_tokens) for group in self.groups)

    def live_ranges(self, num_tokens: int) -> tuple[tuple[Group, range], ...]:
        """Return each group with the tokens that a later token can still read."""
        return tuple((group, group.live_range(num_tokens)) for group in self.groups)

    @property
    def attention_alone(self) -> "ModelSpec":
        """Return the spec without the states of its recurrent layers."""
        return self._without(RecurrentState)

    @property
    def text_alone(self) -> "ModelSpec":
        """Return the spec without the source that its layers attend to."""
        return self._without(CrossAttention)

    def with_kv_dtype(self, dtype: str) -> "ModelSpec":
        """Return the spec with the text's keys, values and latents stored in ``dtype``.

        Recurrent states and a source keep their dtype, since the model reads them as written.

        Raises: ConfigError for an unknown dtype.
        """
        dtype_bytes(dtype)

        def stored(spec: LayerSpec) -> LayerSpec:
            return spec if isinstance(spec, KeptWhole) else replace(spec, dtype=dtype)

        return self._with_specs(stored)

    def computed_in(self, dtype: str) -> "ModelSpec":
        """Return the spec for weights in ``dtype``; all its memory but scans is in ``dtype`` too.

        Raises: ConfigError for an unknown dtype.
        """

        def computed(spec: LayerSpec) -> LayerSpec:
            if isinstance(spec, CrossAttention):
                return replace(spec, dtype=dtype)
            if not isinstance(spec, RecurrentState):
                return spec
            states = (
                replace(s, dtype=dtype) if s.name in IN_WEIGHTS_DTYPE else s for s in spec.states
            )
            return replace(spec, states=tuple(states))

        return self.with_kv_dtype(dtype)._with_specs(computed)

    def with_source_tokens(self, source_tokens: int) -> "ModelSpec":
        """Return the spec with room for sources of ``source_tokens``."""

        def sized(spec: LayerSpec) -> LayerSpec:
            if not isinstance(spec, CrossAttention):
                return spec
            return replace(spec, source_tokens=source_tokens)

        return self._with_specs(sized)

    def _with_specs(self, change: Callable[[LayerSpec], LayerSpec]) -> "ModelSpec":
        layers = (
            replace(layer, specs=tuple(change(spec) for spec in layer.specs))
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def _without(self, kind: type[RecurrentState] | type[CrossAttention]) -> "ModelSpec":
        layers = (
            replace(layer, specs=tuple(kept for kept in layer.specs if not isinstance(kept, kind)))
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))
