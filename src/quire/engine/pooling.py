"""Embeddings of a decoder, as vLLM has them: the last token's hidden state after the last norm.

They have a length of 1, so that the product of two embeddings is their cosine.
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
    """A prompt and its embedding."""

    prompt_token_ids: tuple[int, ...]
    embedding: Embedding = field(repr=False)  # f32[hidden size], or as many as were asked for
    num_cached_tokens: int = 0  # of the prompt, found computed by an earlier one


@dataclass(frozen=True, slots=True, kw_only=True)
class Poolable:
    """The embeddings that a model has. ``why_not`` says why it has none; empty otherwise."""

    name: str
    hidden_size: int
    is_matryoshka: bool  # the first dimensions of an embedding are an embedding too …
    dimensions: tuple[int, ...]  # … of one of these sizes, or of any if empty
    why_not: str

    @classmethod
    def of(cls, loaded: LoadedModel) -> "Poolable":
        """Read from a loaded model which embeddings it has."""
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
        """Check that the model has embeddings of the asked size. Raises: RequestError."""
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
    """Return pairs of places: one text with each other, or each with the one at its place.

    Raises: RequestError for other numbers of texts.
    """
    if not num_1 or not num_2 or (num_1 != 1 and num_1 != num_2):
        raise RequestError(
            f"text_1 has {num_1:,} texts and text_2 {num_2:,}: give one and several, or as many of "
            f"each"
        )
    return [(0 if num_1 == 1 else place, place) for place in range(num_2)]


def scores(embeddings: Sequence[Embedding], of: Sequence[tuple[int, int]]) -> list[float]:
    """Return the cosine of each pair of embeddings, which have the length 1."""
    return [float(np.dot(embeddings[one], embeddings[other])) for one, other in of]
