"""From a plan to logits: one packed forward pass of a Hugging Face model."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from quire.attention import AttentionBackend, make_batch
from quire.engine.scheduler import StepPlan
from quire.errors import ConfigError, UnsupportedModel
from quire.models.hooks import forward, make_step
from quire.models.loader import LoadedModel
from quire.models.rounded import RoundedCache
from quire.spec import ModelSpec, RecurrentState
from quire.strategies import Accounting, Fits, Never, Storage
from quire.strategies.layout import attention_spec
from quire.units import format_bytes, format_count

_TRIAL_TOKENS = 12
_TRIAL_ID = -1  # requests count from 1
# What a model raises when it finds something else than it expects in its cache or its arguments.
_MODEL_ERRORS = (KeyError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class Runner(Protocol):
    """Computes a step. Whoever plans has taken the room already."""

    def run(self, plan: StepPlan) -> Tensor:
        """Logits [S, vocabulary], a row for each of ``plan.sampling``."""
        ...


class ModelRunner:
    """Runs a model over packed chunks, its keys and values kept by any strategy."""

    def __init__(
        self,
        loaded: LoadedModel,
        accounting: Accounting,
        storage: Storage,
        backend: AttentionBackend,
    ) -> None:
        self._model = loaded.model
        self._accounting = accounting
        self._storage = storage
        self._backend = backend

    def run(self, plan: StepPlan) -> Tensor:
        self._storage.apply(self._accounting.drain())
        chunks = [(c.sequence.seq_id, c.start, c.stop) for c in plan.chunks]
        token_ids: list[int] = []
        ends: list[int] = []
        for chunk in plan.chunks:
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.stop]
            if chunk.samples:
                ends.append(len(token_ids) - 1)
        logits, _ = self._forward(chunks, token_ids, ends)
        return logits

    def try_out(self, loaded: LoadedModel, *, max_tokens: int) -> None:
        """A trial, in two chunks: the model must give through the hooks what it gives alone.

        Raises: UnsupportedModel if it does not, naming the layers that never reported.
        """
        name = f"{loaded.name} ({loaded.spec.model_type})"
        token_ids = _trial_tokens(loaded, min(max_tokens, _TRIAL_TOKENS))
        middle = (len(token_ids) + 1) // 2
        rows: list[Tensor] = []
        self._accounting.add(_TRIAL_ID, max_tokens=len(token_ids))
        for start, stop in ((0, middle), (middle, len(token_ids))):
            if not isinstance(self._accounting.try_extend(_TRIAL_ID, stop), Fits):
                break  # a few tokens fit, so there is a use for it; each request is told
            self._storage.apply(self._accounting.drain())
            rows.append(self._trial_chunk(name, token_ids, start, stop))
        self._accounting.free(_TRIAL_ID)
        self._storage.apply(self._accounting.drain())
        if len(rows) < 2:
            return
        kept_as: torch.dtype = getattr(torch, attention_spec(self._accounting.groups[0]).dtype)
        expected = _plain_logits(loaded, token_ids, kept_as)
        deviations = (torch.cat(rows) - expected).abs().amax(-1) / expected.abs().max()
        limit = max(_limit(loaded.model.dtype), _limit(kept_as))
        # In fewer bits a mixture may send a single token to another expert: the median decides.
        exact = limit == _limit(torch.float32)
        deviation = deviations.max() if exact else deviations.median()
        if not deviation <= limit:
            raise UnsupportedModel(
                f"{name} gives other logits packed than alone: {deviation:.1e} of the largest, "
                f"{limit:.0e} allowed"
            )

    def _trial_chunk(self, name: str, token_ids: list[int], start: int, stop: int) -> Tensor:
        """Logits at each of the tokens [start, stop)."""
        chunks, ids = [(_TRIAL_ID, start, stop)], token_ids[start:stop]
        try:
            logits, silent = self._forward(chunks, ids, [*range(len(ids))])
        except UnsupportedModel:
            raise
        except _MODEL_ERRORS as error:
            raise UnsupportedModel(f"{name} does not run packed: {error!r}") from error
        if silent:
            raise UnsupportedModel(
                f"{name}: layers {silent} never reached the cache; their attention does not go "
                f"through Transformers' interface"
            )
        return logits

    def _forward(
        self, chunks: list[tuple[int, int, int]], token_ids: list[int], logits_at: list[int]
    ) -> tuple[Tensor, list[int]]:
        """Logits at some of the packed tokens, and the layers that did not report."""
        groups = range(len(self._accounting.groups))
        batches = [make_batch(self._accounting, group, chunks) for group in groups]
        step = make_step(self._accounting, self._storage, self._backend, batches)
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in chunks])
        wanted = torch.tensor(logits_at, dtype=torch.long)
        logits = forward(self._model, step, torch.tensor(token_ids), positions, wanted)
        return logits, step.silent


def refuse_recurrent(spec: ModelSpec) -> None:
    """Raises: UnsupportedModel for a model with recurrent layers, which cannot be packed."""
    layers = [
        index
        for index, layer in enumerate(spec.layers)
        if any(isinstance(kept, RecurrentState) for kept in layer.specs)
    ]
    if layers:
        raise UnsupportedModel(
            f"{spec.model_type}: layers {layers} keep a recurrent state and cannot be packed yet; "
            f"model.generate(past_key_values=quire.cache(model)) runs it"
        )


def refuse_switching_positions(loaded: LoadedModel, max_model_len: int) -> None:
    """Raises: ConfigError where one long sequence would turn the positions of all others.

    Transformers' "longrope" takes other frequencies for a whole batch as soon as one of its
    positions is past the length of the original training.
    """
    parameters = getattr(loaded.model.config.get_text_config(), "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope":
            limit = rope["original_max_position_embeddings"]
            if max_model_len > limit:
                raise ConfigError(
                    f"{loaded.name} turns its positions otherwise past {format_count(limit)} "
                    f"tokens (longrope), which cannot be done for one sequence of a batch: "
                    f"max_model_len={format_count(max_model_len)} must be at most "
                    f"{format_count(limit)}"
                )


def refuse_too_little(accounting: Accounting, max_tokens: int) -> None:
    """Raises: ConfigError for a cache in which no sequence, however short, finds room."""
    least = min(max_tokens, 2)  # a prompt and a token
    accounting.add(_TRIAL_ID, max_tokens=least)
    verdict = accounting.try_extend(_TRIAL_ID, least)
    accounting.free(_TRIAL_ID)
    accounting.drain()
    if isinstance(verdict, Never):
        raise ConfigError(
            f"{format_bytes(verdict.capacity_bytes)} of KV memory cannot hold even a short "
            f"sequence, which takes {format_bytes(verdict.need_bytes)}: raise "
            f"kv_cache_memory_bytes or lower what one sequence takes (max_model_len, block_size, "
            f"growth_tokens)"
        )


def _trial_tokens(loaded: LoadedModel, num_tokens: int) -> list[int]:
    vocab_size = loaded.model.get_input_embeddings().weight.shape[0]
    return [(3 + 7 * i) % vocab_size for i in range(num_tokens)]


def _plain_logits(loaded: LoadedModel, token_ids: list[int], kept_as: torch.dtype) -> Tensor:
    """What the model says by itself, keys and values rounded to ``kept_as``: [T, vocabulary]."""
    rounded = kept_as != loaded.model.dtype
    cache = RoundedCache(loaded.model.config, kept_as) if rounded else None
    with torch.inference_mode():
        ids = torch.tensor([token_ids])
        logits: Tensor = loaded.model(
            input_ids=ids, past_key_values=cache, use_cache=rounded
        ).logits[0]
    return logits


def _limit(dtype: torch.dtype) -> float:
    """How far logits may be apart that were computed in another order, or kept in ``dtype``.

    In eight bits a product at the edge between two codes may fall to either side.
    """
    if dtype == torch.float32:
        return 1e-3
    return 5e-2 if dtype.itemsize > 1 else 0.25
