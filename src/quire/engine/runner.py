"""From a plan to logits: one packed forward pass of a Hugging Face model."""

from typing import Protocol

import torch
from torch import Tensor

from quire.attention import AttentionBackend, make_batch
from quire.engine.scheduler import StepPlan
from quire.errors import UnsupportedModel
from quire.models.hooks import forward, install, make_step
from quire.models.loader import LoadedModel
from quire.spec import ModelSpec, RecurrentState
from quire.strategies import Accounting, Fits, Storage


class Runner(Protocol):
    """Computes a step. Whoever plans has taken the room already."""

    def run(self, plan: StepPlan) -> Tensor:
        """Logits [S, vocabulary], a row for each of ``plan.sampling``."""
        ...


class ModelRunner:
    """Runs a model over packed chunks, its keys and values kept by any strategy.

    Construction ends with a trial: the model must give through the hooks what it gives alone.
    Raises: UnsupportedModel if it does not, naming the layers that never reported.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        accounting: Accounting,
        storage: Storage,
        backend: AttentionBackend,
    ) -> None:
        refuse_recurrent(loaded.spec)
        self._model = loaded.model
        self._accounting = accounting
        self._storage = storage
        self._backend = backend
        expected = _plain_logits(loaded)
        install(self._model)
        self._try_out(loaded, expected)

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

    def _try_out(self, loaded: LoadedModel, expected: Tensor) -> None:
        trial_id = -1
        token_ids = _trial_tokens(loaded)
        half = len(token_ids) // 2
        self._accounting.add(trial_id, max_tokens=len(token_ids))
        try:
            rows = []
            for start, stop in ((0, half), (half, len(token_ids))):
                if not isinstance(self._accounting.try_extend(trial_id, stop), Fits):
                    return  # too little memory to try: the first request will be told
                self._storage.apply(self._accounting.drain())
                ids = token_ids[start:stop]
                try:
                    logits, silent = self._forward(
                        [(trial_id, start, stop)], ids, list(range(len(ids)))
                    )
                except (KeyError, AttributeError, IndexError, RuntimeError, TypeError) as error:
                    raise UnsupportedModel(
                        f"{loaded.name} ({loaded.spec.model_type}) does not run packed: {error!r}"
                    ) from error
                if silent:
                    raise UnsupportedModel(
                        f"{loaded.name} ({loaded.spec.model_type}): layers {silent} never reached "
                        f"the cache; their attention does not go through Transformers' interface"
                    )
                rows.append(logits)
        finally:
            self._accounting.free(trial_id)
            self._storage.apply(self._accounting.drain())
        deviation = (torch.cat(rows) - expected).abs().max() / expected.abs().max()
        limit = 1e-3 if loaded.model.dtype == torch.float32 else 5e-2
        if not deviation <= limit:
            raise UnsupportedModel(
                f"{loaded.name} ({loaded.spec.model_type}) gives other logits packed than alone: "
                f"{deviation:.1e} of the largest, {limit:.0e} allowed"
            )


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


def _trial_tokens(loaded: LoadedModel) -> list[int]:
    vocab_size = loaded.model.get_input_embeddings().weight.shape[0]
    return [(3 + 7 * i) % vocab_size for i in range(12)]


def _plain_logits(loaded: LoadedModel) -> Tensor:
    """What the model says by itself, without any cache: [12, vocabulary]."""
    with torch.inference_mode():
        ids = torch.tensor([_trial_tokens(loaded)])
        logits: Tensor = loaded.model(input_ids=ids, use_cache=False).logits[0]
    return logits
