"""``/v1/embeddings``, as OpenAI has it, and ``/v1/score``, as vLLM has it."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from quire.server.schemas.completions import MAX_PROMPTS, Prompt
from quire.server.schemas.fields import Addressed, Count, Usage


class EmbeddingRequest(Addressed, kw_only=True):
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None  # float
    dimensions: Count | None = None
    normalize: bool | None = None  # to the length 1: so it is if nothing is said


class Embedding(msgspec.Struct, kw_only=True):
    kind: Literal["embedding"] = field(default="embedding", name="object")
    index: int
    embedding: list[float] | str  # in base64: 32-bit floats, the lowest byte first


class Embeddings(msgspec.Struct, kw_only=True):
    kind: Literal["list"] = field(default="list", name="object")
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]


class ScoreRequest(Addressed, kw_only=True):
    """``text_1`` and ``text_2``, or under their other names ``queries`` and ``documents``."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None


class Score(msgspec.Struct, kw_only=True):
    kind: Literal["score"] = field(default="score", name="object")
    index: int
    score: float


class Scores(msgspec.Struct, kw_only=True):
    kind: Literal["list"] = field(default="list", name="object")
    id: str
    created: int
    model: str
    data: list[Score]
    usage: Usage
