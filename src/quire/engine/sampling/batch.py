"""What a step asks of its rows of logits, and what came of it: the seam between host and device.

Rows are counted in the order of the draws, one more for each draft. ``on_host`` and ``device`` do
the work; what of it is taken is the sampler's matter.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from quire.engine.sampling.logits_processors import Edits, Rules
from quire.engine.sequence import TokenLogprobs
from quire.engine.step_plan import PromptRows

# A row whose token is drawn at random, the token's place in its sequence, and the sequence's rules.
Lot: TypeAlias = tuple[int, int, Rules]


class Wanted(NamedTuple):
    """A row that is to say how likely its token is, beside ``num_top`` others; -1: beside all."""

    row: int
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    rows: list[int]  # of the runner's logits; it may give more of them than are asked for
    edits: Edits
    lots: list[Lot]  # the tokens of all other rows are their likeliest
    wanted: list[Wanted]
    prompt_rows: tuple[PromptRows, ...]

    @property
    def is_all(self) -> bool:
        """The rows are the runner's first ones, in order."""
        return self.rows == list(range(len(self.rows)))


class Choices(Protocol):
    """A token for each row, as if the drafts before it hold."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def sound(self) -> list[bool]:
        """Whether there is a token at all."""
        ...

    @property
    def prompt_logprobs(self) -> list[list[TokenLogprobs]]:
        """Of each of ``prompt_rows``."""
        ...

    def peak(self, row: int) -> float:
        """The row's largest logit, as the model gave it: NaN if there is any in the row."""
        ...

    def logprobs(self, wanted: Several[Wanted]) -> list[TokenLogprobs]:
        """Of the tokens in these rows, each of which was among those that asked."""
        ...
