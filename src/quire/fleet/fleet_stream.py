"""``Stream``: a request of a fleet until its reader has all, wherever it is continued meanwhile."""

import asyncio
from dataclasses import dataclass, field, replace
from random import Random

from quire.engine.outputs import TextDelta
from quire.engine.sequence import FinishReason, Request

_SEED_BITS = 63


@dataclass(slots=True, eq=False)
class Stream:
    """A request until its reader has all, or has left."""

    request: Request
    name: str
    token_ids: list[int] = field(default_factory=list)  # that its reader has, of one choice
    has_begun: bool = False  # its reader has a piece
    num_lost: int = 0  # replicas
    passed: set[str] = field(default_factory=set)  # replicas that refused it
    open_choices: set[int] = field(default_factory=set)
    num_cached_tokens: int = 0  # of the prompt, where it began
    is_aborted: bool = False
    remote_id: str = ""  # its name at the replica
    patient_until_s: float | None = None  # since no replica could take it
    is_broken: bool = False  # no piece of this replica is waited for any more
    waits: asyncio.Timeout | None = None  # for a piece
    apart: "Stream | None" = None  # its prompt alone, at a prefill replica

    def break_off(self) -> None:
        """End the wait for the replica's next piece, now or when it begins, with ReplicaLost."""
        self.is_broken = True
        if self.waits is not None and not self.waits.expired():
            self.waits.reschedule(asyncio.get_running_loop().time())

    @property
    def can_go_on(self) -> bool:
        """Whether another replica can go on after a part of it."""
        request = self.request
        return request.params.n == 1 and request.beam is None and request.pooling is None

    @property
    def may_move(self) -> bool:
        """Whether it may go on elsewhere: once, and a part of it only where that can be."""
        return not self.num_lost and (self.can_go_on or not self.has_begun)

    def rest(self) -> Request:
        """Return what is left of the request: all, where its reader has nothing yet."""
        if not self.has_begun:
            return self.request
        # The reader has the prompt's logprobs already.
        params = replace(self.request.params, prompt_logprobs=None)
        outputs = (*self.request.output_token_ids, *self.token_ids)
        return replace(
            self.request, params=params, output_token_ids=outputs, resumption=None, remote=None
        )

    def note(self, delta: TextDelta) -> TextDelta:
        """Note a piece that its reader gets, and return it as that is to see it."""
        if self.num_lost and self.has_begun:
            delta = replace(delta, num_cached_tokens=self.num_cached_tokens)
        self.num_cached_tokens = delta.num_cached_tokens
        self.has_begun, self.patient_until_s = True, None
        self.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self.open_choices.discard(delta.choice)
        return delta

    def ends(self, reason: FinishReason, detail: str) -> list[TextDelta]:
        """Return the last piece of each choice that has none."""
        return [
            TextDelta(
                index=0,
                choice=choice,
                text="",
                token_ids=(),
                finish_reason=reason,
                detail=detail,
                num_cached_tokens=self.num_cached_tokens,
            )
            for choice in sorted(self.open_choices)
        ]


def seeded(request: Request, seeds: Random) -> Request:
    """Give a request that samples without a seed one, so that another replica draws the same."""
    params = request.params
    is_greedy = params.temperature == 0 or params.top_k == 1
    if is_greedy or params.seed is not None or request.pooling is not None:
        return request
    return replace(request, params=replace(params, seed=seeds.getrandbits(_SEED_BITS)))
