"""A Hugging Face model that computes packed steps."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from quire.errors import UnsupportedModel
from quire.models.cache_argument import cache_argument
from quire.models.executors.hooks import (
    ATTENTION_NAME,
    EngineCache,
    PackedStep,
    hearing_hidden,
    reading_through_attend,
)
from quire.models.executors.latent import LatentLayers
from quire.models.fused_modules import FusedModules
from quire.models.model_watch import ModelWatch
from quire.models.recorded.recordings import Recordings
from quire.models.row_watch import RowsApart
from quire.spec import LatentAttention


class PackedModel:
    """A model that computes packed steps. Between two of them it is its owner's, as it was.

    Raises: UnsupportedModel as ``reading_through_attend`` does, and for latents that have to be
    expanded where nothing is gathered.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stand_ins: FusedModules | None = None,
        watch: ModelWatch | None = None,  # of a caller that has it look before each pass
        *,
        latents: Mapping[int, LatentAttention] | None = None,  # layers that keep them
        gathers: bool = False,  # every layer: its model changes what was kept
        records: bool = True,  # passes over few tokens; False for what has states of its own
    ) -> None:
        self._model = model
        self._stand_ins = stand_ins
        self._watch = watch or ModelWatch(model)
        self._gathers = gathers
        self._cache_name = cache_argument(model.forward)
        self._latents = LatentLayers(model, {} if gathers or latents is None else latents)
        for layer, why in self._latents.refused.items():
            raise UnsupportedModel(f"layer {layer} keeps latents that cannot be absorbed: {why}")
        # Transformers goes through every module to set its attention: once is enough to see where.
        with reading_through_attend(model):
            configs = {id(config): config for config in _configs(model)}.values()
            self._configs = [c for c in configs if c._attn_implementation == ATTENTION_NAME]
        # Without our kernels there is little to be gained by playing what has been recorded.
        invariant = stand_ins is not None and stand_ins.cpu.batch_invariant
        self._rows_apart = RowsApart() if invariant else None
        self._recordings = (
            Recordings(self._watch, stand_ins.cpu, self._run) if stand_ins and records else None
        )

    def forward(
        self,
        step: PackedStep,
        token_ids: Tensor,  # i64[T]
        positions: Tensor,  # i64[T]
        logits_at: Tensor,  # i64[S]: the packed tokens whose logits are wanted
    ) -> Tensor:
        """Run one packed forward pass: logits [S, vocabulary]."""
        with torch.inference_mode():
            recording = None
            if self._recordings is not None and self._latents.unchanged and _is_plain(step):
                recording = self._recordings.find(step, len(token_ids))
            if recording is None:
                return self._run(step, token_ids, positions, logits_at)
            logits = recording.play(step, token_ids, positions)
            return logits[logits_at]  # a copy, for the next pass leaves its own there

    def close(self) -> None:
        """Drop what was recorded, which refers to this model."""
        self._recordings = None

    def _run(
        self, step: PackedStep, token_ids: Tensor, positions: Tensor, logits_at: Tensor
    ) -> Tensor:
        """The model's own, in inference mode."""
        exchanged = nullcontext() if self._stand_ins is None else self._stand_ins.in_place()
        # Latents first: they ask whether a linear layer is its owner's, and stand-ins exchange it.
        with (
            self._watch.passing(),
            self._reading(),
            self._latents.in_place() as absorbed,
            exchanged,
            step.in_states(),
            hearing_hidden(self._model, step),
        ):
            step.absorbed = absorbed
            step.gathered = self._gathered(step, absorbed)
            given: dict[str, Any] = {
                "input_ids": token_ids[None],
                "position_ids": positions[None],
                self._cache_name: EngineCache(step, positions),
            }
            if step.images is not None:
                given |= step.images.of_step()
            looking: AbstractContextManager[None] = nullcontext()
            if self._rows_apart is not None:
                looking = self._rows_apart.required(self._watch.version)
            with looking:
                logits: Tensor = self._model(
                    use_cache=True,
                    logits_to_keep=logits_at,
                    quire_step=step,
                    **given,
                ).logits[0]
        # A model that does not know ``logits_to_keep`` gives those of all tokens.
        return logits if len(logits) == len(logits_at) else logits[logits_at]

    def _gathered(self, step: PackedStep, absorbed: Collection[int]) -> Collection[int]:
        if self._gathers:
            return step.specs.keys()
        return [n for n in self._latents.layers if n not in absorbed]  # to be expanded

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What ``reading_through_attend`` does."""
        own = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation_internal = ATTENTION_NAME
            yield
        finally:
            for config, name in zip(self._configs, own, strict=True):
                config._attn_implementation_internal = name


def _is_plain(step: PackedStep) -> bool:
    """Whether a pass is of ids and positions alone, and nothing but logits is asked of it."""
    return step.hidden is None and step.images is None


def _configs(model: PreTrainedModel) -> Iterator[PreTrainedConfig]:
    """All that a model's parts may ask for their attention."""
    waiting = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if config is not None:
            yield config
            waiting += [getattr(config, name) for name in config.sub_configs]
