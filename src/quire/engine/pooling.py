"""From a decoder's last hidden state to an embedding, as vLLM has it for decoders.

The state is that of the last token, behind the last norm: what the model's head would be given. A
length of 1 makes the product of two embeddings their cosine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.engine.sequence import Embedding
from quire.errors import RequestError
from quire.models.loader import LoadedModel
from quire.sampling_params import PoolingParams
from quire.units import format_count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptEmbedding:
    """What came of a prompt."""

    prompt_token_ids: tuple[int, ...]
    embedding: Embedding = field(repr=False)  # f32[hidden size], or as many as were asked for
    num_cached_tokens: int = 0  # of the prompt, found computed by an earlier one


@dataclass(frozen=True, slots=True, kw_only=True)
class Poolable:
    """What embeddings of a model there are. ``why_not``: why there are none; empty otherwise."""

    name: str
    hidden_size: int
    is_matryoshka: bool  # its first dimensions are embeddings too …
    dimensions: tuple[int, ...]  # … as many of them as one of these; of any number if empty
    why_not: str

    @classmethod
    def of(cls, loaded: LoadedModel) -> "Poolable":
        config: Any = loaded.model.config
        why_not = ""
        if loaded.spec.source_tokens:
            why_not = "it is an encoder-decoder, and they are a decoder's last hidden states"
        elif loaded.model.base_model is loaded.model:
            why_not = "its layers and its head are one module, and cannot be told apart"
        dimensions = tuple(getattr(config, "matryoshka_dimensions", None) or ())
        return cls(
            name=loaded.name,
            hidden_size=config.get_text_config(decoder=True).hidden_size,
            is_matryoshka=bool(dimensions) or bool(getattr(config, "is_matryoshka", False)),
            dimensions=dimensions,
            why_not=why_not,
        )

    def check(self, params: PoolingParams) -> None:
        """Raises: RequestError for a model without embeddings, or without those of that size."""
        if self.why_not:
            raise RequestError(f"{self.name} has no embeddings: {self.why_not}")
        asked = params.dimensions
        if asked is None or asked == self.hidden_size:
            return
        if not self.is_matryoshka:
            raise RequestError(
                f"dimensions={format_count(asked)}: embeddings of {self.name} have "
                f"{format_count(self.hidden_size)}, and it was not trained for fewer (config.json "
                f"has neither is_matryoshka nor matryoshka_dimensions): leave dimensions out"
            )
        if asked > self.hidden_size or (self.dimensions and asked not in self.dimensions):
            known = ", ".join(map(str, self.dimensions)) or f"1 to {self.hidden_size}"
            raise RequestError(f"dimensions={format_count(asked)} must be one of: {known}")


def pairs(num_1: int, num_2: int) -> list[tuple[int, int]]:
    """Which texts are compared: one with each of the others, or each with the one at its place.

    Raises: RequestError for other numbers of them.
    """
    if not num_1 or not num_2 or (num_1 != 1 and num_1 != num_2):
        raise RequestError(
            f"text_1 has {num_1:,} texts and text_2 {num_2:,}: give one and several, or as many of "
            f"each"
        )
    return [(0 if num_1 == 1 else place, place) for place in range(num_2)]


def scores(embeddings: Sequence[Embedding], of: Sequence[tuple[int, int]]) -> list[float]:
    """The cosine of each pair of them, which have the length 1."""
    return [float(np.dot(embeddings[one], embeddings[other])) for one, other in of]
