"""Requests and sequences: what a client asked for, and how far the engine has come with it.

Nothing here knows about memory; ``num_computed_tokens`` says how many tokens the cache holds.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.engine.structured import Grammar
from quire.kv import NO_KEYS, PrefixKeys
from quire.sampling_params import BeamSearchParams, PoolingParams, SamplingParams

FinishReason = Literal["stop", "length", "capacity", "abort", "error"]
Embedding: TypeAlias = NDArray[np.float32]  # [hidden size], or as many dimensions as were asked for
# The model's: logits that are no numbers. The request's: rules that leave no token.
Fault: TypeAlias = Literal["model", "request"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """A token's log-probability, and the likeliest tokens in its place."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability), the likeliest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asked for."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    keys: PrefixKeys = NO_KEYS  # with whom its prefix may be shared
    priority: int = 0  # smaller ones go first, and what they leave in the cache goes last
    bad_words: tuple[tuple[int, ...], ...] = ()  # the params' words, as token ids
    suppressed: tuple[int, ...] = ()  # tokens that the model's generation config lets come nowhere
    suppressed_first: tuple[int, ...] = ()  # … and those that it does not let begin
    grammar: Grammar | None = None  # of the params' structured_outputs
    source: object = None  # what an encoder reads for it, as the runner knows it
    beam: BeamSearchParams | None = None  # a search chooses its tokens, by their log-probabilities
    pooling: PoolingParams | None = None  # it ends with its prompt's embedding, and has no text

    @property
    def chosen_outside(self) -> bool:
        """Its sequences do not choose their tokens themselves."""
        return self.beam is not None

    @property
    def num_choices(self) -> int:
        """How many continuations are given."""
        return self.params.n if self.beam is None else self.beam.num_choices

    @property
    def max_tokens(self) -> int:
        """The longest it can become, prompt included. The last token's entry is never needed."""
        if self.pooling is not None:
            return len(self.prompt_token_ids)
        return len(self.prompt_token_ids) + self.params.max_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """The running state of one continuation of a request.

    ``seq_id`` grows with the order of arrival. The others of n continuations are the first one's
    ``siblings`` until its prompt is computed; then each goes its own way.
    """

    request: Request
    seq_id: int
    index: int = 0  # which continuation of the request
    token_ids: list[int] = field(default_factory=list)  # prompt and continuation
    siblings: list["Sequence"] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found computed when it was admitted
    num_preemptions: int = 0
    num_saved_tokens: int = 0  # of those computed then, that swap holds
    most_computed_tokens: int = 0  # ever, as far as it has come
    came_back: bool = False  # after a preemption, and since then no sequence has made room
    awaits_choice: bool = False  # all is computed, and a search is to choose the next token
    needs_room_at_once: bool = False  # it was preempted with no other there to make room
    # Tokens that it had, and bytes that were left, when that did not help and it went on in chunks.
    began_again_with: tuple[int, int] = (0, 0)
    most_found_tokens: int = -1  # of its prefix, when it last waited for others to compute more …
    num_waits_in_vain: int = 0  # … and how often it has since, and found none
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of all but the first token
    embedding: Embedding | None = None  # if it was asked for, as soon as it is there
    finish_reason: FinishReason | None = None
    finish_detail: str = ""  # for people: why it ended early
    fault: Fault = None  # whose it is that no token could be sampled
    shares_prompt: bool = False  # that a sibling has computed
    # When, by the engine's clock, in seconds; None: not yet.
    arrived_s: float = 0.0
    came_s: float | None = None  # into a step, for the first time
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)

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
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def goes_its_own_way(self) -> bool:
        """No sibling waits for it, no search chooses for it, and it is to have tokens at all."""
        request = self.request
        return not self.siblings and not request.chosen_outside and request.pooling is None

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the prompt's own log-probabilities were asked for and are not all there."""
        asked = self.request.params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1
