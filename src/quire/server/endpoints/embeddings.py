"""``POST /v1/embeddings``, as OpenAI has it, and ``POST /v1/score``, as vLLM has it."""

import base64
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from quire.engine.pooling import pairs, scores
from quire.engine.sequence import Embedding as Vector
from quire.sampling_params import PoolingParams
from quire.server.endpoints.answers import Json, as_json
from quire.server.endpoints.generation import (
    Generation,
    engine_request,
    one_by_one,
    prompt_ids,
)
from quire.server.request_context import RequestContext
from quire.server.schemas.completion_request import MAX_PROMPTS, Prompt, prompts_of
from quire.server.schemas.request_fields import Addressed, Count, TokenUsage
from quire.server.wire.error_responses import Refused, invalid
from quire.units import format_count

# -- requests and answers --------------------------------------------------------------------------


class EmbeddingRequest(Addressed, kw_only=True):
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None  # float
    dimensions: Count | None = None
    normalize: bool | None = None  # to the length 1; true by default

    def validate(self, names: Sequence[str]) -> None:
        super().validate(names)
        prompts_of(self.input, "input")


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
    usage: TokenUsage


Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]


class ScoreRequest(Addressed, kw_only=True):
    """``text_1`` and ``text_2``, or under their other names ``queries`` and ``documents``."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None

    def validate(self, names: Sequence[str]) -> None:
        super().validate(names)
        first, second = self.texts()
        if len(first) + len(second) > MAX_PROMPTS:
            raise invalid(
                "text_2",
                f"{len(first):,} and {len(second):,} texts are more than a request may have "
                f"together, {MAX_PROMPTS:,}: ask in several",
            )

    def texts(self) -> tuple[list[str], list[str]]:
        """Return the texts on both sides. Raises: Refused where a side has no name, or two."""
        return (
            self._side(self.text_1, self.queries, "text_1", "queries"),
            self._side(self.text_2, self.documents, "text_2", "documents"),
        )

    @staticmethod
    def _side(given: Texts | None, other: Texts | None, name: str, other_name: str) -> list[str]:
        if (given is None) == (other is None):
            raise invalid(name, f"give either {name} or {other_name}")
        texts = other if given is None else given
        return [texts] if isinstance(texts, str) else list(texts or ())


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
    usage: TokenUsage


# -- embeddings ------------------------------------------------------------------------------------


# Numbers in an answer. Writing one as JSON takes ten times as long, and the event loop waits.
_MOST_FLOATS, _MOST_IN_BASE64 = 2**20, 2**22


async def embeddings(context: RequestContext, asked: EmbeddingRequest) -> Json[Embeddings]:
    """Return the embedding of a text, or of several."""
    packed = asked.encoding_format == "base64"
    pooling = PoolingParams(dimensions=asked.dimensions, normalize=asked.normalize is not False)
    prompts = prompts_of(asked.input, "input")
    size = asked.dimensions or context.service.engine.facts.embeddings.hidden_size
    _refuse_too_much(len(prompts) * size, packed=packed)
    vectors, usage = await _vectors(context, prompts, asked, pooling)

    def answer(index: int, vector: Vector) -> Embedding:
        as_text = base64.b64encode(vector.astype("<f4").tobytes()).decode() if packed else None
        return Embedding(index=index, embedding=as_text or vector.tolist())

    return as_json(
        context,
        Embeddings(
            id=f"embd-{context.id}",
            created=context.created,
            model=asked.model or context.service.model_name,
            data=await one_by_one(answer, vectors),
            usage=usage,
        ),
    )


async def score(context: RequestContext, asked: ScoreRequest) -> Json[Scores]:
    """Return how alike texts are: the cosine of their embeddings."""
    first, second = asked.texts()
    compared = [(one, len(first) + other) for one, other in pairs(len(first), len(second))]
    vectors, usage = await _vectors(context, [*first, *second], asked, PoolingParams())
    found = scores(vectors, compared)
    return as_json(
        context,
        Scores(
            id=f"score-{context.id}",
            created=context.created,
            model=asked.model or context.service.model_name,
            data=[Score(index=index, score=each) for index, each in enumerate(found)],
            usage=usage,
        ),
    )


async def _vectors(
    context: RequestContext,
    prompts: Sequence[str | list[int]],
    asked: Addressed,
    pooling: PoolingParams,
) -> tuple[list[Vector], TokenUsage]:
    """Raises: Refused; RequestError; ClientGone."""
    context.service.engine.facts.embeddings.check(pooling)  # before a text is tokenized
    requests = [
        await engine_request(
            context, await prompt_ids(context, prompt, asked, leaves=0), pooling, asked
        )
        for prompt in prompts
    ]
    work = Generation(context, requests, "embeddings")
    vectors = []
    for own in await work.gather():
        if own.embedding is None:
            why = own.stop_reason or own.finish_reason
            raise Refused(
                503, f"a text ended before its embedding: {why}", code="engine_unavailable"
            )
        vectors.append(own.embedding)
    return vectors, work.usage()


def _refuse_too_much(num_floats: int, *, packed: bool) -> None:
    """Raises: Refused."""
    if num_floats > (_MOST_IN_BASE64 if packed else _MOST_FLOATS):
        raise invalid(
            "input",
            f"{format_count(num_floats)} numbers are asked for, and an answer may have "
            f"{format_count(_MOST_FLOATS)}, or {format_count(_MOST_IN_BASE64)} with "
            f"encoding_format=base64: ask in several",
        )
