"""Requests and sequences: what a client asked for, and how far the engine has come with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.engine.detokenizer import Detokenizer
from quire.engine.structured import Grammar
from quire.kv import NO_KEYS, PrefixKeys
from quire.sampling_params import BeamSearchParams, PoolingParams, SamplingParams

FinishReason = Literal["stop", "length", "capacity", "abort", "error"]
Embedding: TypeAlias = NDArray[np.float32]  # [hidden size], or as many dimensions as were asked for
# "model": its logits are no numbers. "request": its rules leave no token to sample.
Fault: TypeAlias = Literal["model", "request"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """A token's log-probability, and the likeliest tokens in its place."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), the likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteBlocks:
    """Blocks of a prompt that another server has computed and keeps for a while."""

    host: str  # vLLM's remote_host, or unix:PATH
    port: int
    lease: str  # vLLM's remote_request_id: the name by which they can be released


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """How far a continuation had come in the engine that began it."""

    detokenizer: Detokenizer | None  # at the last token; None without a tokenizer
    finish_reason: FinishReason | None  # None: it goes on
    stopped_by: str | int | None = None  # the stop string or stop token that ended it


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asked for."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    keys: PrefixKeys = NO_KEYS  # of the clients that may share its prefix
    priority: int = 0  # smaller ones go first, and their cached blocks are evicted last
    bad_words: tuple[tuple[int, ...], ...] = ()  # the params' words, as token ids
    suppressed: tuple[int, ...] = ()  # tokens that the generation config bars …
    suppressed_first: tuple[int, ...] = ()  # … and those that it bars as the first
    grammar: Grammar | None = None  # of the params' structured_outputs
    source: object = None  # an encoder's input, as the runner knows it
    images: object = None  # behind placeholders of the prompt, as the runner knows them
    beam: BeamSearchParams | None = None  # a beam search chooses its tokens
    pooling: PoolingParams | None = None  # it ends with its prompt's embedding, and has no text
    leaves_blocks: bool = False  # another server will go on with its prompt
    remote: RemoteBlocks | None = None  # another server has begun with it
    output_token_ids: tuple[int, ...] = ()  # that another engine has generated: it goes on there
    resumption: Resumption | None = None  # what follows from them
    session: str | None = None  # of the client's; a fleet keeps its requests where they were

    @property
    def chosen_outside(self) -> bool:
        """Whether a beam search chooses the tokens, in place of the sampler."""
        return self.beam is not None

    @property
    def num_choices(self) -> int:
        """How many continuations the client gets."""
        return self.params.n if self.beam is None else self.beam.num_choices

    @property
    def retained_tokens(self) -> tuple[tuple[int, float], ...]:
        """The first so many tokens of the prompt are to stay in the cache, for so many seconds."""
        length = len(self.prompt_token_ids)
        return tuple(
            (length if each.num_tokens is None else min(each.num_tokens, length), each.seconds)
            for each in self.params.retentions
        )

    @property
    def max_tokens(self) -> int:
        """The most tokens of a sequence, prompt included. The last one's entry is never needed."""
        if self.pooling is not None:
            return len(self.prompt_token_ids)
        return len(self.prompt_token_ids) + self.params.max_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """The running state of one continuation of a request.

    ``seq_id`` grows in the order of arrival. Of n continuations the others are the first one's
    ``siblings`` until its prompt is computed.
    """

    request: Request
    seq_id: int
    index: int = 0  # which continuation of the request
    token_ids: list[int] = field(default_factory=list)  # prompt and continuation
    siblings: list["Sequence"] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the cache at admission
    num_retained_tokens: int = 0  # … kept there for a while, as its client asks …
    lacks_retention: bool = False  # … which the cache has yet to be told
    num_preemptions: int = 0
    num_saved_tokens: int = 0  # tokens whose entries swap holds
    most_computed_tokens: int = 0  # before any preemption
    came_back: bool = False  # it was admitted after its preemption, and none was preempted since
    awaits_choice: bool = False  # all is computed, and a search must choose the next token
    needs_room_at_once: bool = False  # it was alone when it was preempted
    # Its tokens and the free bytes when room at once did not help and it went on in chunks.
    began_again_with: tuple[int, int] = (0, 0)
    most_found_tokens: int = -1  # of its prefix, when it last waited for a step to compute more …
    num_waits_in_vain: int = 0  # … and how many times it has found no more since
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of all but the first token
    embedding: Embedding | None = None  # if it was asked for, once it is computed
    kv_transfer_params: Mapping[str, object] | None = None  # of the blocks that it has left
    remote: RemoteBlocks | None = None  # which wait for it at another server, until it first runs
    finish_reason: FinishReason | None = None
    finish_detail: str = ""  # for people: why it ended early
    fault: Fault = None  # why no token could be sampled
    shares_prompt: bool = False  # a sibling has computed its prompt
    # Times of the engine's clock, in seconds; None: not yet.
    arrived_s: float = 0.0
    came_s: float | None = None  # of its first admission
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = [*self.request.prompt_token_ids, *self.request.output_token_ids]
        self.lacks_retention = bool(self.request.params.retentions)
        if not self.index:
            self.remote = self.request.remote

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_own_tokens(self) -> int:
        """Return the output tokens that this engine has generated."""
        return self.num_output_tokens - len(self.request.output_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def goes_its_own_way(self) -> bool:
        """Whether no sibling waits for it, no search chooses for it, and it generates tokens."""
        request = self.request
        return not self.siblings and request.beam is None and request.pooling is None

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt were asked for and some are missing."""
        asked = self.request.params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1
