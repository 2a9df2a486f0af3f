"""A token for each row of a step's logits, chosen where the logits lie, and what is told of it.

What the host has to say goes over first, in one copy; then all is set going, and waited for once.
No value that is on a device decides what is done there, so nothing has to come back in between.
Rows are worked on in pieces, which bounds what is held beside the logits, and keeps a piece in a
processor's own cache.

Rows are counted in the order of the draws, one more for each draft.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.devices import Results, to_device
from quire.engine.sampling.draws import DrawBatch, Lot, draw
from quire.engine.sampling.logits_processors import Edits, edits_to_send, make_edits
from quire.engine.sampling.rng import BLOCK, padded
from quire.engine.sequence import TokenLogprobs
from quire.engine.step_plan import PromptRows

# Logits. While its row is drawn or told of, up to 20 bytes are held for each, and what sorting
# takes. The edited ones of all rows come on top.
_AT_ONCE = 2**23
_AT_ONCE_CPU = 2**19  # 2 MiB of weights
_READ_AS_THEY_ARE = (torch.float32, torch.bfloat16, torch.float16)

Sent = Mapping[str, Tensor]


class Wanted(NamedTuple):
    """A row that is to say how likely its token is, beside ``num_top`` others; -1: beside all."""

    row: int
    num_top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """What a step asks of its rows of logits."""

    rows: list[int]  # of the runner's logits; it may give more of them than are asked for
    edits: Edits
    lots: list[Lot]  # the tokens of all other rows are their likeliest
    wanted: list[Wanted]
    prompt_rows: tuple[PromptRows, ...]


@final
class Choices:
    """A token for each row, as if the drafts before it hold.

    ``sound`` says whether a row has a token at all.
    """

    @torch.no_grad()
    def __init__(self, logits: Tensor, work: SamplingBatch) -> None:
        if logits.dtype not in _READ_AS_THEY_ARE:
            logits = logits.float()
        vocab_size, device = logits.shape[-1], logits.device
        lots = DrawBatch(work.lots, vocab_size) if work.lots else None
        asked = _by_num_top(work.wanted, vocab_size)
        arrays = _to_send(work, lots, asked, vocab_size)
        placed = to_device(list(arrays.values()), device) if arrays else []
        sent = dict(zip(arrays, placed, strict=True))
        results = Results(device)
        raw = logits[sent["rows"]] if "rows" in sent else logits[: len(work.rows)].contiguous()
        if raw.is_cpu:
            raw = raw.float()
        tokens = _choose(raw, work, lots, sent, results)
        at_once = _rows_at_once(raw)
        told = [
            (several[start : start + at_once], describe(raw[rows], tokens[rows], num_top, results))
            for num_top, several in asked.items()
            for start, rows in _pieces(sent[f"asked_{num_top}"], at_once)
        ]
        prompts = [
            [
                describe(logits[first : first + len(ids)], ids, _num_top(own, vocab_size), results)
                for start, ids in _pieces(sent[f"prompt_{number}"], at_once)
                for first in (own.row + start,)
            ]
            for number, own in enumerate(work.prompt_rows)
        ]
        arrived = results.arrive()
        chosen, self._peaks = arrived[:2]
        peaks = arrived[2] if work.edits else self._peaks
        self.tokens: list[int] = chosen.tolist()
        self.sound: list[bool] = (np.isfinite(self._peaks) & (peaks > -np.inf)).tolist()
        self.prompt_logprobs = [
            [record for piece in pieces for record in piece.records(arrived)] for pieces in prompts
        ]
        self._logprobs: dict[int, TokenLogprobs] = {}
        for several, piece in told:
            self._logprobs.update(zip(several, piece.records(arrived), strict=True))

    def peak(self, row: int) -> float:
        """Return the row's largest logit, as the model gave it: NaN if there is any in the row."""
        return float(self._peaks[row])

    def logprobs(self, wanted: Several[Wanted]) -> list[TokenLogprobs]:
        """Return those of the tokens in these rows, each of which was among those that asked."""
        return [self._logprobs[row] for row, _ in wanted]


def _to_send(
    work: SamplingBatch, lots: DrawBatch | None, asked: Mapping[int, list[int]], vocab_size: int
) -> dict[str, NDArray[Any]]:
    """Collect all that the device has to be told, by name."""
    arrays: dict[str, NDArray[Any]] = {}
    if work.rows != list(range(len(work.rows))):  # they are not the first ones, in order
        arrays["rows"] = np.array(work.rows)
    if work.edits:
        arrays |= edits_to_send(work.edits)
    if lots is not None:
        arrays |= lots.arrays
    arrays |= {f"asked_{num_top}": np.array(rows) for num_top, rows in asked.items()}
    for number, own in enumerate(work.prompt_rows):
        arrays[f"prompt_{number}"] = _prompt_ids(own, vocab_size)
    return arrays


def _choose(
    raw: Tensor, work: SamplingBatch, lots: DrawBatch | None, sent: Sent, results: Results
) -> Tensor:
    """Choose a token for each row: raw [R, vocabulary] → i64[R].

    Results are the tokens, and the largest logits before edits and after them.
    """
    peaks, tokens = _largest(raw)
    raw_peaks = peaks = peaks.float()
    edited = raw
    if work.edits:
        edited = raw.to(torch.float32, copy=True)
        make_edits(edited, sent)
        peaks, tokens = _largest(edited)
    if lots is not None:
        for part, piece in lots.pieces(_rows_at_once(raw)):
            rows = piece if lots.is_first_rows else sent["lot_rows"][piece]
            tokens[rows] = draw(part, piece, edited[rows], peaks[rows], sent)
    for result in (tokens, raw_peaks, peaks) if work.edits else (tokens, raw_peaks):
        results.add(result)
    return tokens


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Find each row's largest logit and its token: [R, vocabulary] → [R], i64[R].

    Of equals the first is the largest; NaN is larger than anything.
    """
    if not logits.is_cpu:
        peaks, tokens = logits.max(-1)
        return peaks, tokens
    tokens = torch.from_numpy(logits.numpy().argmax(-1))  # a tenth of torch's time
    return logits.gather(1, tokens[:, None])[:, 0], tokens


def _by_num_top(wanted: list[Wanted], vocab_size: int) -> dict[int, list[int]]:
    """Group the rows by how many of the likeliest tokens they ask for."""
    found: dict[int, list[int]] = {}
    for row, num_top in wanted:
        found.setdefault(_capped(num_top, vocab_size), []).append(row)
    return found


def _num_top(rows: PromptRows, vocab_size: int) -> int:
    return _capped(rows.sequence.request.params.prompt_logprobs or 0, vocab_size)


def _capped(num_top: int, vocab_size: int) -> int:
    return vocab_size if num_top < 0 else min(num_top, vocab_size)


def _prompt_ids(rows: PromptRows, vocab_size: int) -> NDArray[np.int64]:
    """Return the tokens that follow these: i64[R]. Raises: IndexError for one without a logit."""
    first = rows.start + 1
    ids = np.array(rows.sequence.token_ids[first : first + rows.num_rows], np.int64)
    if ids.max(initial=0) >= vocab_size:
        raise IndexError(f"token {ids.max()} has no logit: there are {vocab_size}")
    return ids


def _rows_at_once(logits: Tensor) -> int:
    return max(1, (_AT_ONCE_CPU if logits.is_cpu else _AT_ONCE) // logits.shape[-1])


def _pieces(rows: Tensor, num_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Yield pieces of rows i64[R], so many at most, with where each begins."""
    for start in range(0, len(rows), num_rows):
        yield start, rows[start : start + num_rows]


# -- log-probabilities -----------------------------------------------------------------------------

# They are told as the model has them: before penalties, masks, temperature and filters. Logits come
# to the host as they are and the norm of their row beside them, so that ids, ranks and order are
# the same to the bit on every device, and only the norm may be rounded otherwise.

_LOW_BITS = 2**32 - 1


class Described(NamedTuple):
    """The numbers, among results, of rows that are told beside equally many likeliest tokens."""

    token_ids: int
    chosen: int
    ranks: int
    norms: int
    top_ids: int
    top: int

    def records(self, arrived: list[NDArray[Any]]) -> list[TokenLogprobs]:
        """Return what is said of each row, from the results that have arrived, each [R, …]."""
        norms = arrived[self.norms]
        return [
            TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=tuple(top))
            for token_id, logprob, rank, top in zip(
                arrived[self.token_ids].tolist(),
                (arrived[self.chosen].astype(np.float64) - norms).tolist(),
                arrived[self.ranks].tolist(),
                map(
                    zip,
                    arrived[self.top_ids].tolist(),
                    (arrived[self.top].astype(np.float64) - norms[:, None]).tolist(),
                ),
                strict=True,
            )
        ]


def describe(logits: Tensor, token_ids: Tensor, num_top: int, results: Results) -> Described:
    """Send to the host one token of each row, beside the row's ``num_top`` likeliest.

    Shapes: logits [R, vocabulary], token_ids i64[R]. Equal tokens have the same rank, and the lower
    id comes first.
    """
    logits = (logits + 0.0).float()  # which makes -0 and 0 the same bits
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    peaks = logits.amax(-1)
    # By blocks: several threads share a single long row, and add it up in another order.
    blocks = padded((logits - peaks[:, None]).exp_()).view(len(logits), -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).sum(-1)
    likeliest = _likeliest(logits, num_top)
    return Described(
        token_ids=results.add(token_ids),
        chosen=results.add(chosen),
        ranks=results.add((logits > chosen[:, None]).sum(-1, dtype=torch.int32) + 1),
        norms=results.add(peaks.double() + sums.log()),
        top_ids=results.add(likeliest.int()),
        top=results.add(logits.gather(1, likeliest)),
    )


def _likeliest(logits: Tensor, num_top: int) -> Tensor:
    """Find so many ids of each row, the likeliest first: f32[R, vocabulary] → i64[R, num_top].

    A logit and its id make one number, no two of which are equal: so the order among equals does
    not depend on how a device selects.
    """
    size = logits.shape[-1]
    bits = logits.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()  # whole numbers in the order of floats
    ordered <<= 32
    ordered |= _LOW_BITS - torch.arange(size, device=logits.device)
    largest = ordered.topk(num_top, -1).values
    return _LOW_BITS - (largest & _LOW_BITS)
