"""A whole model's memory: its layers, and the groups of layers that remember alike.

``ModelSpec.from_config`` reads any Hugging Face ``config.json``; it neither imports Transformers
nor loads weights. How one layer's bytes are counted is in ``layers``, how a file is read in
``config_json``.
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
        """What one more token costs in all the group's layers, while nothing is forgotten."""
        return self.num_layers * self.spec.bytes_per_token

    def live_start(self, num_tokens: Count) -> Count:
        """The first of so many tokens that a later token can still read here."""
        return self.spec.live_start(num_tokens)

    def live_range(self, num_tokens: int) -> range:
        """Which of the first tokens a later token can still read here."""
        return self.spec.live_range(num_tokens)

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes to keep in all the group's layers once that many tokens are computed."""
        return self.num_layers * self.spec.bytes_for(num_tokens)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block in all the group's layers."""
        return self.num_layers * self.spec.block_bytes(block_size)

    def peak_bytes(self, num_tokens: int, step_tokens: int = 1) -> int:
        """The most bytes held at once on the way to ``num_tokens``, in steps of ``step_tokens``."""
        if not isinstance(self.spec, SlidingWindow | ChunkedAttention):
            return self.bytes_for(num_tokens)  # nothing is forgotten: the end is the peak
        return self.bytes_per_token * self.spec.peak_tokens(num_tokens, step_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a model must remember."""

    model_type: str
    layers: tuple[Layer, ...]
    max_model_len: int  # tokens: the context that the model was made for
    dtype: str  # of the weights, and of K and V unless told otherwise

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
        """Read a config.json, or the one in a model's folder. Raises: also ModelNotLoadable."""
        config, source = config_json.load(path)
        return cls.from_config(config, source)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Layers with equal specs, in the order of their first layer."""
        members: dict[LayerSpec, list[int]] = {}
        for index, layer in enumerate(self.layers):
            for spec in layer.specs:
                members.setdefault(spec, []).append(index)
        return tuple(Group(spec=spec, layers=tuple(layers)) for spec, layers in members.items())

    @property
    def bytes_per_token(self) -> int:
        """What one more token costs while nothing is forgotten."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Those that keep a state, whatever else they keep."""
        return tuple(
            index
            for index, layer in enumerate(self.layers)
            if any(isinstance(kept, RecurrentState) for kept in layer.specs)
        )

    @property
    def source_tokens(self) -> int:
        """The most that a source can have which its layers attend to; 0 where there is none."""
        return max(
            (g.spec.source_tokens for g in self.groups if isinstance(g.spec, CrossAttention)),
            default=0,
        )

    @property
    def state_bytes(self) -> int:
        """What is kept of one sequence whatever its length: recurrent states, a source."""
        return sum(group.bytes_for(1) for group in self.groups if isinstance(group.spec, KeptWhole))

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes that must be kept once ``num_tokens`` are computed and more may follow."""
        return sum(group.bytes_for(num_tokens) for group in self.groups)

    def peak_bytes(self, num_tokens: int, step_tokens: int = 1) -> int:
        """The most bytes held at once on the way to ``num_tokens``, in steps of ``step_tokens``."""
        return sum(group.peak_bytes(num_tokens, step_tokens) for group in self.groups)

    def live_ranges(self, num_tokens: int) -> tuple[tuple[Group, range], ...]:
        """For each group, which of the first tokens a later token can still read."""
        return tuple((group, group.live_range(num_tokens)) for group in self.groups)

    @property
    def attention_alone(self) -> "ModelSpec":
        """The same model without the states of its recurrent layers."""
        return self._without(RecurrentState)

    @property
    def text_alone(self) -> "ModelSpec":
        """The same model without the source that its layers attend to."""
        return self._without(CrossAttention)

    def with_kv_dtype(self, dtype: str) -> "ModelSpec":
        """The same model with keys, values and latents of its text in ``dtype``.

        Recurrent states keep theirs, and so does a source, which its model reads as it was written.

        Raises: ConfigError for an unknown dtype.
        """
        dtype_bytes(dtype)

        def stored(spec: LayerSpec) -> LayerSpec:
            return spec if isinstance(spec, KeptWhole) else replace(spec, dtype=dtype)

        return self._with_specs(stored)

    def computed_in(self, dtype: str) -> "ModelSpec":
        """The same model with its weights in ``dtype``: what it keeps is too, but for its scans.

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
        """The same model with room for sources of so many tokens."""

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
