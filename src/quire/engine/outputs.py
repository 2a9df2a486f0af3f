"""Outputs for the caller: pieces of text while a prompt runs, and the whole at the end."""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from quire.engine.detokenizer import Detokenizer
from quire.engine.sequence import Embedding, Fault, FinishReason, Request, Sequence, TokenLogprobs
from quire.engine.statistics import Latencies
from quire.engine.step_plan import TokenOutput
from quire.errors import RequestError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A piece of one continuation of one prompt: one token, or more for a slow reader.

    The last piece may have no token.
    """

    index: int  # of the prompt, among those of one call
    choice: int = 0  # which of its continuations
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, if they were asked for
    finish_reason: FinishReason | None  # None before the end
    detail: str = ""  # why it ended early; empty otherwise
    fault: Fault = None  # why no token could be sampled, if none could
    stopped_by: str | int | None = None  # the stop string or stop token that ended it
    num_cached_tokens: int = 0  # of the prompt, found computed by an earlier one
    num_retained_tokens: int = 0  # … that stay in the cache for a while, as its params ask
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # in the first piece, if they were asked for
    latencies: Latencies | None = field(default=None, compare=False)  # of the whole, at its end
    cumulative_logprob: float | None = None  # of all tokens, at the end of a beam search
    embedding: Embedding | None = field(default=None, compare=False)  # at the end, if asked for
    # At the end, where another server may go on: what it is to be asked with.
    kv_transfer_params: Mapping[str, object] | None = None

    @property
    def token_id(self) -> int | None:
        """The last token."""
        return self.token_ids[-1] if self.token_ids else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One continuation of a prompt."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    detail: str  # why it ended early; empty otherwise
    stopped_by: str | int | None = None  # the stop string or stop token that ended it
    logprobs: tuple[TokenLogprobs, ...] = ()  # of each token, if they were asked for
    cumulative_logprob: float | None = None  # of all tokens, of a beam search


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """The continuations of a prompt, as many as asked for; the first one's fields are here too."""

    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    num_cached_tokens: int = 0  # of the prompt, found computed by an earlier one
    num_retained_tokens: int = 0  # … that stay in the cache for a while, as its params ask
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of all its tokens but the first, if asked for
    kv_transfer_params: Mapping[str, object] | None = None  # for a server that goes on with it

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def detail(self) -> str:
        return self.choices[0].detail


Deliver = Callable[[TextDelta], None]


@dataclass(frozen=True, slots=True)
class End:
    """How a sequence ends because of its text."""

    reason: FinishReason
    detail: str = ""
    stopped_by: str | int | None = None  # the stop string or stop token


class Listener:
    """Turns one sequence's tokens into pieces of text, and delivers them."""

    def __init__(self, sequence: Sequence, tokenizer: Any, index: int, deliver: Deliver) -> None:
        self._sequence, self._index, self._deliver = sequence, index, deliver
        self._is_first = True
        self._detokenizer = None
        if tokenizer is not None:
            begun = sequence.request.resumption
            self._detokenizer = (
                Detokenizer(tokenizer, sequence.request.params)
                if begun is None or begun.detokenizer is None
                else begun.detokenizer.copy()
            )

    def hear(self, output: TokenOutput) -> End | None:
        """Deliver what a step did. Raises: what ``deliver`` raises.

        Return how the sequence must end if a stop string has come, or a token that the tokenizer
        cannot decode. The reader knows it already.
        """
        sequence, text, end = self._sequence, "", None
        stopped_by: str | int | None = self._stop_token(output)
        if self._detokenizer is not None:
            try:
                text = self._text(self._detokenizer, output)
            except Exception as error:
                log.exception("the text of sequence %d cannot be decoded", sequence.seq_id)
                end = End("error", f"its text cannot be decoded: {error!r}")
                stopped_by = None
            else:
                if self._detokenizer.stopped_by is not None:
                    end, stopped_by = End("stop"), self._detokenizer.stopped_by
        reason = output.finish_reason if end is None else end.reason
        self._deliver(
            TextDelta(
                index=self._index,
                choice=sequence.index,
                text=text,
                token_ids=() if output.token_id is None else (output.token_id,),
                logprobs=() if output.logprobs is None else (output.logprobs,),
                finish_reason=reason,
                detail=sequence.finish_detail if end is None else end.detail,
                fault=sequence.fault,
                stopped_by=stopped_by,
                num_cached_tokens=sequence.num_cached_tokens,
                num_retained_tokens=sequence.num_retained_tokens,
                prompt_logprobs=tuple(sequence.prompt_logprobs) if self._is_first else (),
                latencies=None if reason is None else Latencies.of(sequence),
                embedding=sequence.embedding if reason == "stop" else None,
                kv_transfer_params=None if reason is None else sequence.kv_transfer_params or None,
            )
        )
        self._is_first = False
        return end

    def end(self, end: End) -> None:
        """Deliver the text that was held back, and the end. An error of ``deliver`` is logged."""
        text, sequence = "", self._sequence
        try:
            if self._detokenizer is not None:
                with suppress(Exception):  # ``hear`` has logged it
                    text = self._detokenizer.flush()
            self._deliver(
                TextDelta(
                    index=self._index,
                    choice=sequence.index,
                    text=text,
                    token_ids=(),
                    finish_reason=end.reason,
                    detail=end.detail,
                    stopped_by=end.stopped_by,
                    num_cached_tokens=sequence.num_cached_tokens,
                    num_retained_tokens=sequence.num_retained_tokens,
                    latencies=Latencies.of(sequence),
                )
            )
        except Exception:
            log.exception("the end of sequence %d cannot be delivered", sequence.seq_id)

    def _text(self, detokenizer: Detokenizer, output: TokenOutput) -> str:
        """Return the text that can be shown now."""
        includes_stop = self._sequence.request.params.include_stop_str_in_output
        if output.token_id is None or not (output.is_text or includes_stop):
            return detokenizer.flush()
        return detokenizer.add(output.token_id, last=output.finish_reason is not None)

    def _stop_token(self, output: TokenOutput) -> int | None:
        """Return the token, if it ended the sequence and the request names it."""
        named = self._sequence.request.params.stop_token_ids
        ends = output.finish_reason == "stop" and not output.is_text
        return output.token_id if ends and output.token_id in named else None


def embedding_of(end: TextDelta) -> Embedding:
    """Return a prompt's embedding f32[hidden]. Raises: RequestError if it ended without one."""
    if end.embedding is None:
        raise RequestError(
            f"a prompt ended without an embedding: {end.detail or end.finish_reason}"
        )
    return end.embedding


def completion(
    request: Request, sequences: Iterable[Sequence], deltas: Iterable[TextDelta]
) -> CompletionOutput:
    """Put the pieces of one prompt's continuations together."""
    several = list(sequences)
    pieces: list[list[TextDelta]] = [[] for _ in several]
    for delta in deltas:
        pieces[delta.choice].append(delta)
    return CompletionOutput(
        prompt_token_ids=request.prompt_token_ids,
        choices=tuple(_choice(own) for own in pieces[: request.num_choices]),
        num_cached_tokens=several[0].num_cached_tokens,
        num_retained_tokens=several[0].num_retained_tokens,
        prompt_logprobs=tuple(several[0].prompt_logprobs),
        kv_transfer_params=several[0].kv_transfer_params or None,
    )


def _choice(deltas: list[TextDelta]) -> Choice:
    reason = deltas[-1].finish_reason
    assert reason is not None, "the last piece does not say how it ended"
    return Choice(
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        finish_reason=reason,
        detail=deltas[-1].detail,
        stopped_by=deltas[-1].stopped_by,
        logprobs=tuple(logprobs for delta in deltas for logprobs in delta.logprobs),
        cumulative_logprob=deltas[-1].cumulative_logprob,
    )
