"""What one sequence's parameters and past say about its next token.

All that is kept here follows from the sequence, and catches up with it: a step may be computed
twice, and a sequence that was preempted or is new here gives the same.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.sequence import Request, Sequence
from quire.sampling_params import SamplingParams
from quire.units import ceil_div

# -- token counts ----------------------------------------------------------------------------------

# How often each token has come in a sequence, kept as it grows: what penalties go by.
#
# Only tokens that came have an entry, so a long vocabulary costs nothing.


class TokenCounts:
    """The distinct tokens of one sequence, and how often each was generated.

    The prompt's are among them, with a count of 0, if ``with_prompt``.
    """

    def __init__(self, sequence: Sequence, *, with_prompt: bool) -> None:
        prompt = sequence.request.prompt_token_ids if with_prompt else ()
        ids = np.unique(np.array(prompt, np.int64))
        self._num_prompt_ids = self._num_ids = len(ids)
        self._ids = np.concatenate([ids, np.zeros(64, np.int64)])
        self._counts = np.zeros(len(self._ids), np.int64)
        self._entries = dict(zip(ids.tolist(), range(len(ids)), strict=True))

    @property
    def token_ids(self) -> NDArray[np.int64]:
        return self._ids[: self._num_ids]

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._counts[: self._num_ids]

    def add(self, token_id: int) -> None:
        entry = self._entries.setdefault(token_id, self._num_ids)
        if entry == self._num_ids:
            if entry == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[entry] = token_id
            self._num_ids += 1
        self._counts[entry] += 1

    def take_back(self, token_id: int) -> None:
        """Undo the latest ``add`` that was not taken back, of this token."""
        entry = self._entries[token_id]
        self._counts[entry] -= 1
        if entry >= self._num_prompt_ids and not self._counts[entry]:
            del self._entries[token_id]
            self._num_ids -= 1


# -- edits -----------------------------------------------------------------------------------------

# Changes to rows of logits before a token is chosen: gathered row by row, made all at once where
# the logits lie.


Ids = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]


class Edits:
    """Changes in the order in which they are made: masks, what is barred, biases, penalties.

    Definitions: vLLM's. The repetition penalty divides a logit above 0 and multiplies one below;
    then the frequency penalty is subtracted as often as the token came, the presence penalty once.
    A row has one mask, one set of biases and one of penalties at most, each id in them once.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.masks: list[tuple[int, NDArray[np.uint8]]] = []
        self.barred: list[tuple[int, Ids]] = []  # a row more than once, and its ids too
        self.biases: list[tuple[int, Ids, NDArray[np.float32]]] = []
        self.penalties: list[tuple[int, Ids, Ids, SamplingParams]] = []

    def bar(self, row: int, token_ids: list[int]) -> None:
        """Exclude tokens from a row."""
        self.barred.append((row, self._known(token_ids)))

    def allow(self, row: int, bits: NDArray[np.uint8]) -> None:
        """Exclude all tokens but some: u8[vocabulary / 8], a bit a token, a byte's lowest first."""
        self.masks.append((row, bits))

    def bias(self, row: int, biases: Mapping[int, float]) -> None:
        """Add to the logits of some tokens of a row."""
        token_ids = self._known(list(biases))
        values = np.array([biases[token_id] for token_id in token_ids.tolist()], np.float32)
        self.biases.append((row, token_ids, values))

    def penalise(self, row: int, tally: TokenCounts, params: SamplingParams) -> None:
        """Add the penalties of the tokens that have come so far."""
        self.penalties.append((row, tally.token_ids.copy(), tally.counts.copy(), params))

    def __bool__(self) -> bool:
        return bool(self.masks or self.barred or self.biases or self.penalties)

    def _known(self, token_ids: list[int]) -> Ids:
        """Leave out the tokens that the model has no logit for."""
        ids = np.array(token_ids, np.int64)
        return ids[ids < self.vocab_size]


def edits_to_send(edits: Edits) -> Arrays:
    """Return all that ``make_edits`` needs, by name.

    Ids and counts of a long text are many, so they travel as 32 bits each, and the rows that they
    belong to as one length a row.

    Raises: IndexError for an id without a logit. On a device an index that is too large would end
    the process's work there.
    """
    arrays: Arrays = {}
    if edits.masks:
        arrays["mask_rows"] = np.array([row for row, _ in edits.masks])
        arrays["mask_bits"] = np.stack([bits for _, bits in edits.masks])
    if edits.barred:
        arrays |= _spread("barred", [(row, ids) for row, ids in edits.barred], edits.vocab_size)
    if edits.biases:
        places = [(row, ids) for row, ids, _ in edits.biases]
        arrays |= _spread("biased", places, edits.vocab_size)
        arrays["biases"] = np.concatenate([values for _, _, values in edits.biases])
    if edits.penalties:
        places = [(row, ids) for row, ids, _, _ in edits.penalties]
        arrays |= _spread("penalised", places, edits.vocab_size)
        counts = [counts for _, _, counts, _ in edits.penalties]
        arrays["counts"] = np.concatenate(counts).astype(np.int32)
        each = [
            (p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            for _, _, _, p in edits.penalties
        ]
        arrays["penalties"] = np.array(each, np.float32)
    return arrays


def make_edits(logits: Tensor, sent: Mapping[str, Tensor]) -> None:
    """Change logits f32[R, vocabulary], contiguous, as ``edits_to_send`` said."""
    vocab_size = logits.shape[-1]
    if "mask_rows" in sent:
        rows, bits = sent["mask_rows"], sent["mask_bits"]
        places = torch.arange(8, device=logits.device, dtype=torch.uint8)
        is_clear = ((bits[:, :, None] >> places) & 1) == 0  # of a byte's 8 tokens
        is_clear = is_clear.view(len(bits), -1)[:, :vocab_size]
        logits.index_copy_(0, rows, logits[rows].masked_fill_(is_clear, -torch.inf))
    flat = logits.view(-1)
    if "barred_ids" in sent:
        places, _ = _places("barred", sent, vocab_size)
        flat.index_fill_(0, places, -torch.inf)
    if "biases" in sent:
        places, _ = _places("biased", sent, vocab_size)
        flat.index_copy_(0, places, flat[places] + sent["biases"])
    if "penalties" in sent:
        places, owners = _places("penalised", sent, vocab_size)
        repetition, frequency, presence = sent["penalties"][owners].unbind(-1)
        found, counts = flat[places], sent["counts"].double()
        found = torch.where(found > 0, found / repetition, found * repetition).double()
        # In float64 and rounded once.
        found -= frequency.double() * counts
        found -= presence.double() * (counts > 0)
        flat.index_copy_(0, places, found.float())


def _spread(name: str, places: list[tuple[int, Ids]], vocab_size: int) -> Arrays:
    ids = np.concatenate([ids for _, ids in places]).astype(np.int32)
    if len(ids) and ids.max() >= vocab_size:
        raise IndexError(f"token {ids.max()} has no logit: there are {vocab_size}")
    return {
        f"{name}_ids": ids,
        f"{name}_rows": np.array([row for row, _ in places]),
        f"{name}_lengths": np.array([len(ids) for _, ids in places]),
    }


def _places(name: str, sent: Mapping[str, Tensor], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Find where in all logits each id is, and the entry that it belongs to: both i64[ids]."""
    ids, rows = sent[f"{name}_ids"], sent[f"{name}_rows"]
    entries = torch.arange(len(rows), device=ids.device)
    # With its size known, there is nothing to wait for.
    owners = entries.repeat_interleave(sent[f"{name}_lengths"], output_size=len(ids))
    return rows[owners] * vocab_size + ids, owners


# -- bad words -------------------------------------------------------------------------------------

# Tokens that must not come next: the last of a bad word, and what would end a text too early.


class BadWords:
    """Several words as token ids; a word's last token is barred where the rest of it has come."""

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._always: list[int] = []
        self._after: dict[int, list[tuple[int, ...]]] = {}  # by a word's last token but one
        self.num_before = 0  # tokens that have to be looked at
        for word in words:
            if len(word) == 1:
                self._always.append(word[0])
            else:
                self._after.setdefault(word[-2], []).append(word)
                self.num_before = max(self.num_before, len(word) - 1)

    def barred(self, before: list[int]) -> list[int]:
        """Return what must not follow the last ``num_before`` tokens that were generated."""
        words = self._after.get(before[-1], ()) if before else ()
        return self._always + [
            word[-1] for word in words if tuple(before[1 - len(word) :]) == word[:-1]
        ]


def ends_of(request: Request, eos_token_ids: Iterable[int]) -> list[int]:
    """Return the tokens that end a request's text, in order."""
    params = request.params
    return sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)})


# -- one sequence ----------------------------------------------------------------------------------


Bits: TypeAlias = NDArray[np.uint8]


class Rules:
    """What one sequence's parameters say. ``key`` is that of its randomness."""

    def __init__(self, sequence: Sequence, key: int, eos_token_ids: frozenset[int]) -> None:
        request = sequence.request
        params = request.params
        self.key = key
        self.is_greedy = params.temperature == 0 or params.top_k == 1
        self.matcher = request.grammar.matcher() if request.grammar is not None else None
        self.params = params
        self._sequence, self._token_ids = sequence, sequence.token_ids
        self._ends = ends_of(request, eos_token_ids) if params.min_tokens else []
        self._bad_words = BadWords(request.bad_words) if request.bad_words else None
        self._tally: TokenCounts | None = None
        repeats = params.repetition_penalty != 1
        if repeats or params.presence_penalty or params.frequency_penalty:
            self._tally = TokenCounts(sequence, with_prompt=repeats)
        self._num_counted = sequence.num_prompt_tokens
        self.edits_logits = bool(
            self.matcher
            or self._tally
            or self._bad_words
            or self._ends
            or request.suppressed
            or request.suppressed_first
            or params.logit_bias
            or params.allowed_token_ids
        )
        self._allowed: Bits | None = None  # made when the first row is there

    def follows(self, sequence: Sequence) -> bool:
        """Tell whether it is still the text that is known here, with more at its end at most."""
        return sequence.token_ids is self._token_ids and len(self._token_ids) >= self._num_counted

    def write(self, edits: Edits, row: int, drafts: tuple[int, ...]) -> None:
        """Add what changes in row ``row``, and for each draft in one more, if it is reached."""
        self._catch_up()
        allowed = self._allowed_of(edits.vocab_size)
        if self.matcher is not None:
            for place, bits in enumerate(self.matcher.masks(drafts)):
                edits.allow(row + place, bits if allowed is None else bits & allowed)
        elif allowed is not None:
            for place in range(len(drafts) + 1):
                edits.allow(row + place, allowed)
        for place in range(len(drafts) + 1):
            self._write_one(edits, row + place, drafts[:place])
            if self._tally is not None and place < len(drafts):
                self._tally.add(drafts[place])
        if self._tally is not None:
            for draft in reversed(drafts):
                self._tally.take_back(draft)

    def _write_one(self, edits: Edits, row: int, before: tuple[int, ...]) -> None:
        """Add one row's; ``before`` are the drafts before it, which the tally counts already."""
        sequence = self._sequence
        request = sequence.request
        is_first = not before and not sequence.num_output_tokens
        if barred := [*request.suppressed, *(request.suppressed_first if is_first else ())]:
            edits.bar(row, barred)
        if self._bad_words is not None:
            first = sequence.num_tokens - self._bad_words.num_before
            recent = sequence.token_ids[max(first, sequence.num_prompt_tokens) :]
            edits.bar(row, self._bad_words.barred([*recent, *before]))
        if self._ends and sequence.num_output_tokens + len(before) < self.params.min_tokens:
            edits.bar(row, self._ends)
        if self.params.logit_bias:
            edits.bias(row, self.params.logit_bias)
        if self._tally is not None:
            edits.penalise(row, self._tally, self.params)

    def _allowed_of(self, vocab_size: int) -> Bits | None:
        """As ``Edits.allow`` takes them, and as many as a grammar's; None: all may come."""
        if self.params.allowed_token_ids is not None and self._allowed is None:
            is_allowed = np.zeros(32 * ceil_div(vocab_size, 32), np.bool)
            is_allowed[list(self.params.allowed_token_ids)] = True
            self._allowed = np.packbits(is_allowed, bitorder="little")
        return self._allowed

    def _catch_up(self) -> None:
        sequence = self._sequence
        new = sequence.token_ids[self._num_counted :]
        self._num_counted = sequence.num_tokens
        if self._tally is not None:
            for token_id in new:
                self._tally.add(token_id)
        if self.matcher is not None:
            self.matcher.consume(new)
