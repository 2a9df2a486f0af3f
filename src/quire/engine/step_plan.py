"""What goes round in a step: the plan that says what is computed, and what came of it."""

from collections.abc import Iterable
from dataclasses import dataclass

from quire.engine.sequence import Fault, FinishReason, Sequence, TokenLogprobs
from quire.kv.interface import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens [start, stop) of one sequence, to be computed in one step.

    ``drafts`` are guesses at the tokens after its last one; they are the chunk's last tokens.
    Before ``start`` the last ``num_restored`` are brought back from swap.
    """

    sequence: Sequence
    start: int
    stop: int
    drafts: tuple[int, ...] = ()
    num_restored: int = 0
    samples: bool  # the step brings the sequence up to date, so that its next token is due

    @property
    def token_ids(self) -> list[int]:
        own = self.sequence.token_ids[self.start : self.stop]
        return own + list(self.drafts) if self.drafts else own

    @property
    def new_token_ids(self) -> list[int]:
        """Those that the cache holds after this step, if the drafts are right, and not before."""
        if not self.num_restored:
            return self.token_ids
        return self.sequence.token_ids[self.start - self.num_restored : self.start] + self.token_ids

    @property
    def pools(self) -> bool:
        """Its last token's hidden state is what its sequence is for."""
        return self.samples and self.sequence.request.pooling is not None

    @property
    def logits_from(self) -> int:
        """The first token whose logits are wanted, up to ``stop``."""
        if self.sequence.request.pooling is not None:
            return self.stop
        if self.sequence.lacks_prompt_logprobs:
            return self.start
        return self.stop - 1 - len(self.drafts) if self.samples else self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A sequence whose next token is due.

    Its logits are row ``row``; one row more for each draft, if those before it hold. The siblings
    of a sequence draw from its row.
    """

    sequence: Sequence
    row: int
    drafts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Rows of logits that tell the log-probabilities of a prompt's tokens from ``start`` + 1 on."""

    sequence: Sequence
    row: int
    start: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Entries of a sequence that has just lost its room, where they lie until room is made."""

    sequence: Sequence
    slots: tuple[Slots, ...]  # in each group: of the last tokens, as far back as one is readable
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass. The rows of its logits are those of each chunk, in order.

    Before storage carries out what was decided for it, ``saves`` are copied to swap.
    """

    chunks: tuple[Chunk, ...]
    draws: tuple[Draw, ...]
    prompt_rows: tuple[PromptRows, ...]
    saves: tuple[Save, ...] = ()

    @classmethod
    def of(cls, chunks: Iterable[Chunk], saves: tuple[Save, ...] = ()) -> "StepPlan":
        several = tuple(chunks)
        draws: list[Draw] = []
        prompt_rows: list[PromptRows] = []
        end = 0
        for chunk in several:
            sequence, row = chunk.sequence, end
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
        return cls(chunks=several, draws=tuple(draws), prompt_rows=tuple(prompt_rows), saves=saves)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    @property
    def num_read(self) -> int:
        """Entries that attention reads, where it reads all."""
        return sum(chunk.stop for chunk in self.chunks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What came of a draw: the drafts that hold and one token more, or an error instead."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if they were asked for
    ends: bool = False  # nothing can follow the last token
    error: str = ""
    fault: Fault = None  # whose the error is


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """What a step did for one sequence: a token, or the news that it has ended, or both."""

    sequence: Sequence
    token_id: int | None
    is_text: bool = True  # False: the token only ended it
    finish_reason: FinishReason | None
    logprobs: TokenLogprobs | None = None
