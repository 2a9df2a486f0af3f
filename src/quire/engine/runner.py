"""From a plan to logits: one packed forward pass of a Hugging Face model."""

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from quire.attention import AttentionBackend, make_batch, packed_tokens
from quire.engine.kv_cache import KVCache
from quire.engine.plan import StepPlan
from quire.engine.sequence import Sequence
from quire.errors import ConfigError, UnsupportedModel
from quire.models.hooks import make_step
from quire.models.loader import LoadedModel
from quire.models.packed import PackedModel
from quire.models.recurrent import RecurrentLayers
from quire.models.rounded import RoundedCache
from quire.models.stand_ins import StandIns
from quire.strategies import Accounting, Fits, Never
from quire.strategies.layout import attention_spec
from quire.units import format_bytes, format_count

_TRIAL_TOKENS = 12
_TRIAL_ID = -1  # requests count from 1
# What a model raises when it finds something else than it expects in its cache or its arguments.
_MODEL_ERRORS = (KeyError, AttributeError, IndexError, RuntimeError, TypeError, ValueError)


class Runner(Protocol):
    """Computes a step whose room is there: what accounting decided has been carried out."""

    def run(self, plan: StepPlan) -> Tensor:
        """Logits [rows, vocabulary]: those of each chunk from ``logits_from`` on, in order."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        ...

    def forget_all(self) -> None:
        """Everybody begins anew, or has ended."""
        ...


class ModelRunner:
    """Runs a model over packed chunks, its keys and values kept by any strategy."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv: KVCache,
        backend: AttentionBackend,
        stand_ins: StandIns | None = None,  # of the model
    ) -> None:
        layers = loaded.spec.recurrent_layers
        self._model = PackedModel(loaded.model, stand_ins, records=not layers)
        self._kv = kv
        self._backend = backend
        self._recurrent = RecurrentLayers(loaded.model, layers) if layers else None
        self._stateful: dict[Sequence, int] = {}  # whose states are kept, since which preemption

    @property
    def state_bytes(self) -> int:
        """What is kept for recurrent layers at this moment."""
        return 0 if self._recurrent is None else self._recurrent.states.num_bytes

    def run(self, plan: StepPlan) -> Tensor:
        chunks: list[tuple[int, int, int]] = []
        token_ids: list[int] = []
        wanted: list[int] = []  # the packed tokens whose logits are
        for chunk in plan.chunks:
            chunks.append((chunk.sequence.seq_id, chunk.start, chunk.stop))
            token_ids += chunk.token_ids
            wanted += range(len(token_ids) - (chunk.stop - chunk.logits_from), len(token_ids))
        if self._recurrent is not None:
            for sequence in [s for s, n in self._stateful.items() if n < s.num_preemptions]:
                self.forget(sequence)  # it has made room, and begins anew
            for chunk in plan.chunks:
                self._stateful[chunk.sequence] = chunk.sequence.num_preemptions
        logits, _ = self._forward(chunks, token_ids, wanted)
        return logits

    def forget(self, sequence: Sequence) -> None:
        if self._recurrent is not None:
            self._recurrent.states.forget(sequence.seq_id)
            self._stateful.pop(sequence, None)

    def forget_all(self) -> None:
        for sequence in list(self._stateful):
            self.forget(sequence)

    def try_out(self, loaded: LoadedModel, *, max_tokens: int) -> None:
        """A trial, chunk by chunk: the model must give through the hooks what it gives alone.

        Raises: UnsupportedModel if it does not, naming the layers that never reported.
        """
        name = f"{loaded.name} ({loaded.spec.model_type})"
        token_ids = _trial_tokens(loaded, min(max_tokens, _TRIAL_TOKENS))
        stops = self._trial_stops(len(token_ids))
        rows: list[Tensor] = []
        self._kv.accounting.add(_TRIAL_ID, max_tokens=len(token_ids))
        for start, stop in pairwise([0, *stops]):
            if not isinstance(self._kv.accounting.try_extend(_TRIAL_ID, stop), Fits):
                break  # a few tokens fit, so there is a use for it; each request is told
            self._kv.carry_out()
            self._kv.require()
            rows.append(self._trial_chunk(name, token_ids, start, stop))
        self._kv.accounting.free(_TRIAL_ID)
        self._kv.carry_out()
        if self._recurrent is not None:
            self._recurrent.states.forget(_TRIAL_ID)
        if len(rows) < len(stops):
            return
        kept_as: torch.dtype = getattr(torch, attention_spec(self._kv.accounting.groups[0]).dtype)
        expected = _plain_logits(loaded, token_ids, kept_as)
        deviations = (torch.cat(rows) - expected).abs().amax(-1) / expected.abs().max()
        limit = max(_limit(loaded.model.dtype), _limit(kept_as))
        # In fewer bits a mixture may send a single token to another expert: the median decides.
        exact = limit == _limit(torch.float32)
        deviation = deviations.max() if exact else deviations.median()
        if self._recurrent is not None:
            self._refuse_inexact_states(loaded, name, stops)
        if not deviation <= limit:
            raise UnsupportedModel(
                f"{name} gives other logits packed than alone: {deviation:.1e} of the largest, "
                f"{limit:.0e} allowed{self._way_out}"
            )

    def _refuse_inexact_states(self, loaded: LoadedModel, name: str, stops: list[int]) -> None:
        """What the rounding of logits would hide. Raises: UnsupportedModel."""
        assert self._recurrent is not None
        hidden_size: int = loaded.model.config.get_text_config().hidden_size
        deviation, limit = self._recurrent.deviation(stops, hidden_size), _limit(torch.float32)
        if not deviation <= limit:
            raise UnsupportedModel(
                f"{name} computes other states chunk by chunk: {deviation:.1e} of the largest "
                f"output, {limit:.0e} allowed{self._way_out}"
            )

    @property
    def _way_out(self) -> str:
        if self._recurrent is None:
            return ""
        return (
            "; its recurrent layers do not go on from one chunk to the next as this engine needs: "
            "model.generate(past_key_values=quire.cache(model)) runs it"
        )

    def _trial_stops(self, num_tokens: int) -> list[int]:
        """Two chunks; of a model with states, some tokens of the second come one by one."""
        middle = (num_tokens + 1) // 2
        if self._recurrent is None:
            return [middle, num_tokens]
        return [middle, *range(max(middle + 1, num_tokens - 2), num_tokens + 1)]

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
        groups = range(len(self._kv.accounting.groups))
        batches = [make_batch(self._kv.accounting, group, chunks) for group in groups]
        step = make_step(self._kv.accounting, self._kv.storage, self._backend, batches)
        positions = packed_tokens(chunks)
        wanted = torch.tensor(logits_at, dtype=torch.long)
        ids = torch.tensor(token_ids)
        states = nullcontext() if self._recurrent is None else self._recurrent.in_place(chunks)
        with states:
            logits = self._model.forward(step, ids, positions, wanted)
        return logits, step.silent


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
    return [(3 + 7 * i) % loaded.vocab_size for i in range(num_tokens)]


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
