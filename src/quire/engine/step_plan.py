"""The plan of a step, and its outputs.

``Chunk``, ``Draw`` and ``TokenOutput`` are made for each sequence of each step, and nothing changes
them. They are not frozen, because making a frozen one takes twice as long (decision 143).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quire.engine.sequence import Fault, FinishReason, Sequence, TokenLogprobs
from quire.kv.interface import Slots


@dataclass(slots=True, kw_only=True)
class Chunk:
    """Tokens [start, stop) of one sequence, which one step computes.

    ``drafts`` are guesses at the tokens behind the sequence's last one; they are the chunk's last
    tokens. The ``num_restored`` tokens before ``start`` come back from swap.
    """

    sequence: Sequence
    start: int
    stop: int
    drafts: tuple[int, ...] = ()
    num_restored: int = 0
    samples: bool  # the chunk ends with the sequence's last token: the next one is sampled

    @property
    def token_ids(self) -> list[int]:
        own = self.sequence.token_ids[self.start : self.stop]
        return own + list(self.drafts) if self.drafts else own

    @property
    def new_token_ids(self) -> list[int]:
        """The tokens whose entries the step adds to the cache, if the drafts are right."""
        if not self.num_restored:
            return self.token_ids
        return self.sequence.token_ids[self.start - self.num_restored : self.start] + self.token_ids

    @property
    def pools(self) -> bool:
        """Whether its last token's hidden state becomes the sequence's embedding."""
        return self.samples and self.sequence.request.pooling is not None

    @property
    def logits_from(self) -> int:
        """The first of the tokens up to ``stop`` whose logits are wanted."""
        if self.sequence.request.pooling is not None:
            return self.stop
        if self.sequence.lacks_prompt_logprobs:
            return self.start
        return self.stop - 1 - len(self.drafts) if self.samples else self.stop


@dataclass(slots=True, kw_only=True)
class Draw:
    """A sequence whose next token is sampled from row ``row`` of the logits.

    Each draft has one row more, which counts if the drafts before it hold. Siblings share a row.
    """

    sequence: Sequence
    row: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Rows of logits for the log-probabilities of a prompt's tokens from ``start`` + 1 on."""

    sequence: Sequence
    row: int
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Entries of a preempted sequence, to be saved before storage reuses their slots."""

    sequence: Sequence
    slots: tuple[Slots, ...]  # in each group: of the tokens that later ones can read
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass, whose logits have each chunk's rows in order.

    ``saves`` are copied to swap before storage carries out the changes for the plan.
    ``num_outlooks``: how often planning has worked out what all running sequences will need.
    """

    chunks: tuple[Chunk, ...]
    draws: tuple[Draw, ...]
    prompt_rows: tuple[PromptRows, ...]
    saves: tuple[Save, ...] = ()
    num_outlooks: int = 0

    @classmethod
    def of(
        cls, chunks: Iterable[Chunk], saves: tuple[Save, ...] = (), num_outlooks: int = 0
    ) -> "StepPlan":
        """Make a plan of chunks, with the draws and prompt rows that follow from them."""
        several = tuple(chunks)
        draws: list[Draw] = []
        prompt_rows: list[PromptRows] = []
        end = 0
        for chunk in several:
            sequence, row = chunk.sequence, end
            request = sequence.request
            if request.pooling is None and request.params.prompt_logprobs is None:  # as mostly
                if chunk.samples:
                    end += 1 + len(chunk.drafts)
                    draws.append(Draw(sequence=sequence, row=row, drafts=chunk.drafts))
                    if sequence.siblings:
                        draws += [Draw(sequence=each, row=row) for each in sequence.siblings]
                continue
            end += chunk.stop - chunk.logits_from
            if sequence.lacks_prompt_logprobs:
                last = min(chunk.stop, sequence.num_prompt_tokens - 1)
                rows = PromptRows(
                    sequence=sequence, row=row, start=chunk.start, num_rows=last - chunk.start
                )
                prompt_rows.append(rows)
            if chunk.samples and not chunk.pools:
                first = end - 1 - len(chunk.drafts)
                draws.append(Draw(sequence=sequence, row=first, drafts=chunk.drafts))
                if sequence.siblings:
                    draws += [Draw(sequence=sibling, row=first) for sibling in sequence.siblings]
        return cls(
            chunks=several,
            draws=tuple(draws),
            prompt_rows=tuple(prompt_rows),
            saves=saves,
            num_outlooks=num_outlooks,
        )

    @property
    def num_tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    @property
    def num_read(self) -> int:
        """The entries that attention reads, where no window hides any."""
        return sum(chunk.stop for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What came of a draw: the drafts that hold and one token more, or an error."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if they were asked for
    ends: bool = False  # nothing can follow the last token
    error: str = ""
    fault: Fault = None  # of the error


@dataclass(slots=True, kw_only=True)
class TokenOutput:
    """What a step did for one sequence: a token, or the sequence's end, or both."""

    sequence: Sequence
    token_id: int | None
    is_text: bool = True  # False: the token only ended the sequence
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
