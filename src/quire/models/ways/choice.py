"""Three ways to run a model, the fastest first. Which of them is right for it, a trial says.

* ``table``: keys and values go to their slots, and attention reads through block tables.
* ``gathered``: they go to their slots; what a step reads is copied out of them for the model, which
  changes it before it attends. Still one pass for all sequences.
* ``alone``: a pass for each sequence's chunk, with the model's own attention and masks.
"""

from typing import Protocol

from torch import Tensor

from quire.errors import UnsupportedModel
from quire.models.loader import LoadedModel
from quire.models.stand_ins import StandIns
from quire.models.watched import ModelWatch
from quire.models.ways.alone import LoneModel
from quire.models.ways.hooks import Step
from quire.models.ways.packed import PackedModel
from quire.spec import LatentAttention

WAYS = ("table", "gathered", "alone")


class Way(Protocol):
    """Computes a step over what a storage holds."""

    def forward(
        self, step: Step, token_ids: Tensor, positions: Tensor, logits_at: Tensor
    ) -> Tensor:
        """Logits [S, vocabulary] at some of the packed tokens."""
        ...

    def close(self) -> None:
        """Let go of what was made of the model. Nothing is run any more."""
        ...


def make_way(
    name: str,
    loaded: LoadedModel,
    stand_ins: StandIns | None = None,
    watch: ModelWatch | None = None,
    *,
    records: bool = True,
) -> Way:
    """One of ``WAYS``. Raises: UnsupportedModel for a model that cannot be run so."""
    if loaded.spec.source_tokens and name != "alone":
        raise UnsupportedModel("each of its texts reads a source of its own, of another length")
    if name == "table":
        latents = {
            number: spec
            for number, layer in enumerate(loaded.spec.layers)
            for spec in layer.specs
            if isinstance(spec, LatentAttention)
        }
        records &= not loaded.spec.recurrent_layers
        return PackedModel(loaded.model, stand_ins, watch, latents=latents, records=records)
    if name == "gathered":
        return PackedModel(loaded.model, stand_ins, watch, gathers=True, records=False)
    return LoneModel(loaded.model, stand_ins, watch)
