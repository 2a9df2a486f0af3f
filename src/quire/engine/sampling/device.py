"""A step's work where the logits lie: all of it is set going, and then waited for once.

What the host has to say goes over first, in one copy. No value that is on the device decides what
is done there, so nothing has to come back in between. Rows are worked on in pieces, which bounds
what is held beside the logits.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.devices import Results, to_device
from quire.engine.sampling.batch import Lot, SamplingBatch, Wanted
from quire.engine.sampling.logits_processors import Edits, Ids
from quire.engine.sampling.rng import keys_at
from quire.engine.sequence import TokenLogprobs
from quire.engine.step_plan import PromptRows

# -- random numbers --------------------------------------------------------------------------------

# The race of ``sampling.draws`` on a device: the same numbers to the bit, the same two rounds.
#
# Torch has no unsigned 64-bit arithmetic. Sums and products of int64 wrap around to the same bits,
# and what a shift to the right brings in from the sign is masked away.


BLOCK = 128  # weights that are summed before any of them is looked at, as on the host
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR = 0x94D049BB133111EB - 2**64


def uniforms(keys: Tensor, first: int, count: int) -> Tensor:
    """Numbers ``first`` to ``first + count`` of each key, above 0 and below 1.

    Shapes: keys i64[R], the bits of the host's keys; f64[R, count].
    """
    numbers = torch.arange(first + 1, first + count + 1, device=keys.device) * _GOLDEN
    bits = _shifted(_mixed(keys[:, None] + numbers), 11)
    return (bits.double() + 0.5) * 2.0**-53


def padded(weights: Tensor) -> Tensor:
    """With zeros up to the next whole block: [R, whole blocks] of [R, vocabulary]."""
    missing = -weights.shape[-1] % BLOCK
    return torch.nn.functional.pad(weights, (0, missing)) if missing else weights


def drawn(weights: Tensor, keys: Tensor) -> Tensor:
    """A token of each row, each as often as its weight says: i64[R].

    Shapes: weights f32[R, whole blocks], none below 0 and some above; keys i64[R].
    """
    blocks = weights.view(len(weights), -1, BLOCK)
    # The numbers of both rounds at once: the first ones are for the tokens of the block that wins.
    handicaps = -uniforms(keys, 0, BLOCK + blocks.shape[1]).log()
    # In float64, so that neither the device nor the number of rows decides how a sum is rounded.
    block = (blocks.sum(-1, dtype=torch.float64) / handicaps[:, BLOCK:]).argmax(-1)
    return block * BLOCK + (block_of(blocks, block) / handicaps[:, :BLOCK]).argmax(-1)


def block_of(blocks: Tensor, block: Tensor) -> Tensor:
    """One block of each row: [R, BLOCK] of [R, blocks, BLOCK]."""
    return blocks.gather(1, block[:, None, None].expand(-1, 1, BLOCK))[:, 0]


def _mixed(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST_FACTOR
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND_FACTOR
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, num_bits: int) -> Tensor:
    """To the right, zeros coming in."""
    mask: int = 2 ** (64 - num_bits) - 1
    return (numbers >> num_bits) & mask


# -- filters ---------------------------------------------------------------------------------------

# The filters of ``sampling.filters`` on a device: each row by its own, the same definitions.
#
# Where every row has a small top-k, as most models recommend it, the largest weights are enough
# and nothing is sorted.


_NEXT_BELOW_ONE = 1 - 2.0**-53  # a number above 0 times this is the next one below it


class Filters(NamedTuple):
    """Of each row."""

    top_k: Tensor  # i64[R], from 1 to the vocabulary
    tails: Tensor  # f64[R]: 1 - top_p, the share of the smallest weights that goes
    min_p: Tensor  # f32[R]


def weights_of(logits: Tensor, peaks: Tensor, temperatures: Tensor) -> Tensor:
    """exp((logit - peak) / temperature), and zeros up to a whole block: f32[R, whole blocks].

    Shapes: logits [R, vocabulary], peaks f32[R], temperatures f32[R], none too small to divide by.
    """
    weights = logits - peaks[:, None]  # in float32, whatever the logits are
    weights.div_(temperatures[:, None]).exp_()
    return padded(weights)


def cut(weights: Tensor, floors: Tensor) -> None:
    """Make what is below its row's floor 0."""
    weights.masked_fill_(weights < floors[:, None], 0)


def floors_by_sorting(weights: Tensor, filters: Filters) -> Tensor:
    """The least weight of each row that is kept: f32[R]."""
    ordered = weights.sort(-1).values
    kth = ordered.gather(1, ordered.shape[-1] - filters.top_k[:, None])[:, 0]
    floors = torch.maximum(filters.min_p, kth)
    cut(ordered, floors)
    blocks = ordered.view(len(ordered), -1, BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    # Of the smallest weights those go that add up to 1 - top_p of all at most.
    block, left = _passed(sums, filters.tails * sums[:, -1])
    inside = block_of(blocks, block)
    last, _ = _passed(inside.double().cumsum(-1), left)
    return torch.maximum(floors, inside.gather(1, last[:, None])[:, 0])


def floors_of_largest(weights: Tensor, filters: Filters, num_largest: int) -> Tensor:
    """The same, where no row's top-k is above ``num_largest``."""
    largest = weights.topk(num_largest, -1).values
    kth = largest.gather(1, filters.top_k[:, None] - 1)[:, 0]
    floors = torch.maximum(filters.min_p, kth)
    # What equals the floor stays too, and is not all among the largest.
    num_equal = (weights == floors[:, None]).sum(-1) - (largest == floors[:, None]).sum(-1)
    cut(largest, floors)
    ordered = torch.cat([floors[:, None], largest.flip(-1)], -1)
    masses = ordered.double()
    masses[:, 0] *= num_equal
    sums = masses.cumsum(-1)
    last, _ = _passed(sums, filters.tails * sums[:, -1])
    return torch.maximum(floors, ordered.gather(1, last[:, None])[:, 0])


def _passed(sums: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Where growing sums first are above a share, and what is left of it there.

    A share that rounding has lifted to the whole falls on the last that adds something.
    """
    shares = shares.minimum(sums[:, -1] * _NEXT_BELOW_ONE)
    first = torch.searchsorted(sums, shares[:, None], right=True)
    # A row that is not finite has none: it is of no account, but an index must not be out of range.
    first.clamp_(max=sums.shape[-1] - 1)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, first)
    return first[:, 0], shares - before[:, 0]


# -- draw batch ------------------------------------------------------------------------------------

# The rows whose tokens are drawn, in the order in which a device can take them together.
#
# Sorting is the dearest part of drawing, so rows are apart by what their filters need: nothing,
# their few largest weights, or all of them in order.


FEW = 256  # the greatest top-k that is looked for instead of sorting
_TINY = np.finfo(np.float32).tiny

Need = Literal["nothing", "the largest", "order"]


@dataclass(frozen=True, slots=True)
class DrawPart:
    """Lots [start, stop), whose filters need the same."""

    start: int
    stop: int
    need: Need
    has_floors: bool = True  # some row has a min-p
    num_largest: int = 0


class DrawBatch:
    """A step's. ``arrays`` is what ``draw`` needs on the device."""

    def __init__(self, lots: list[Lot], vocab_size: int) -> None:
        rows, places, rules = zip(*lots, strict=True)
        params = [own.params for own in rules]
        top_k = np.array([min(p.top_k, vocab_size) for p in params])
        top_k[top_k < 1] = vocab_size
        top_p = np.array([p.top_p for p in params])
        min_p = np.array([p.min_p for p in params], np.float32)
        is_ordered = (top_k < vocab_size) | (top_p < 1)
        needs = np.where(is_ordered, np.where(top_k <= FEW, 1, 2), 0)
        order = np.argsort(needs, kind="stable")
        keys = np.array([own.key for own in rules], np.uint64)
        temperatures = np.array([p.temperature for p in params])
        self.arrays: dict[str, NDArray[Any]] = {
            "lot_rows": np.array(rows)[order],
            "lot_keys": keys_at(keys, np.array(places)).view(np.int64)[order],
            "temperatures": np.maximum(temperatures, _TINY).astype(np.float32)[order],
            "top_k": top_k[order],
            "tails": (1.0 - top_p)[order],
            "min_p": min_p[order],
        }
        in_order = self.arrays["lot_rows"] == np.arange(len(lots))
        self.is_first_rows = bool(in_order.all())
        ends = np.searchsorted(needs[order], [0, 1, 2, 3]).tolist()
        most = int(self.arrays["top_k"][ends[1] : ends[2]].max(initial=0))
        floored = bool(self.arrays["min_p"][: ends[1]].any())
        parts = (
            DrawPart(ends[0], ends[1], "nothing", has_floors=floored),
            DrawPart(ends[1], ends[2], "the largest", num_largest=most),
            DrawPart(ends[2], ends[3], "order"),
        )
        self._parts = [part for part in parts if part.start < part.stop]

    def pieces(self, num_rows: int) -> Iterator[tuple[DrawPart, slice]]:
        """Of so many lots at most, each of one part."""
        for part in self._parts:
            for start in range(part.start, part.stop, num_rows):
                yield part, slice(start, min(start + num_rows, part.stop))


def draw(
    part: DrawPart, piece: slice, logits: Tensor, peaks: Tensor, sent: Mapping[str, Tensor]
) -> Tensor:
    """A token for each lot of a piece, from its row of ``logits`` and the row's largest: i64[R]."""
    weights = weights_of(logits, peaks, sent["temperatures"][piece])
    filters = Filters(sent["top_k"][piece], sent["tails"][piece], sent["min_p"][piece])
    if part.need == "order":
        cut(weights, floors_by_sorting(weights, filters))
    elif part.need == "the largest":
        cut(weights, floors_of_largest(weights, filters, part.num_largest))
    elif part.has_floors:
        cut(weights, filters.min_p)
    # The weights of a row that is not finite are no numbers, and its token is of no account.
    return drawn(weights, sent["lot_keys"][piece]).clamp_(max=logits.shape[-1] - 1)


# -- edits -----------------------------------------------------------------------------------------

# The changes of ``sampling.edits`` on a device: the same operations, so the same bits.
#
# Ids and counts of a long text are many, so they travel as 32 bits each, and the rows that they
# belong to as one length a row.


Arrays = dict[str, NDArray[Any]]


def edits_to_send(edits: Edits) -> Arrays:
    """All that ``make_edits`` needs. Raises: IndexError for an id without a logit.

    On a device an index that is too large would end the process's work there.
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
    """``logits``: f32[R, vocabulary], in one piece of memory."""
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
        # In float64 and rounded once, as on the host, where counts are 64 bits wide.
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
    """Where in all logits each id is, and the entry that it belongs to."""
    ids, rows = sent[f"{name}_ids"], sent[f"{name}_rows"]
    entries = torch.arange(len(rows), device=ids.device)
    # With its size known, there is nothing to wait for.
    owners = entries.repeat_interleave(sent[f"{name}_lengths"], output_size=len(ids))
    return rows[owners] * vocab_size + ids, owners


# -- logprobs --------------------------------------------------------------------------------------

# The log-probabilities of ``sampling.logprobs`` on a device; the host makes the records.
#
# Logits come back as they are and their row's norm beside them, so that ids, ranks and order are
# the host's to the bit, and only the norm may be rounded otherwise.


_LOW_BITS = 2**32 - 1


class Described(NamedTuple):
    """Numbers of results, of some rows that are told beside equally many likeliest tokens."""

    token_ids: int
    chosen: int
    ranks: int
    norms: int
    top_ids: int
    top: int

    def records(self, arrived: list[NDArray[Any]]) -> list[TokenLogprobs]:
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


def described(logits: Tensor, token_ids: Tensor, num_top: int, results: Results) -> Described:
    """One token in each row, beside its row's ``num_top`` likeliest.

    Equal tokens have the same rank, and the lower id comes first.
    """
    logits = (logits + 0.0).float()  # which makes -0 and 0 the same bits
    chosen = logits.gather(1, token_ids[:, None])[:, 0]
    peaks = logits.amax(-1)
    sums = (logits - peaks[:, None]).exp_().sum(-1, dtype=torch.float64)
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
    """So many token ids of each row, the likeliest first: i64[R, num_top].

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


# -- a step on a device ----------------------------------------------------------------------------


# Logits. While its row is drawn or told of, up to 20 bytes are held for each, and what the device's
# own sorting takes. The edited ones of all rows come on top.
_AT_ONCE = 2**23
_READ_AS_THEY_ARE = (torch.float32, torch.bfloat16, torch.float16)

Sent = Mapping[str, Tensor]


@final
class DeviceChoices:
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
        tokens = _choose(raw, work, lots, sent, results)
        at_once = _rows_at_once(vocab_size)
        told = [
            (several[start : start + at_once], described(raw[rows], tokens[rows], num_top, results))
            for num_top, several in asked.items()
            for start, rows in _pieces(sent[f"asked_{num_top}"], at_once)
        ]
        prompts = [
            [
                described(logits[first : first + len(ids)], ids, _num_top(own, vocab_size), results)
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
        return float(self._peaks[row])

    def logprobs(self, wanted: Several[Wanted]) -> list[TokenLogprobs]:
        return [self._logprobs[row] for row, _ in wanted]


def _to_send(
    work: SamplingBatch, lots: DrawBatch | None, asked: Mapping[int, list[int]], vocab_size: int
) -> dict[str, NDArray[Any]]:
    """All that the device has to be told, by name."""
    arrays: dict[str, NDArray[Any]] = {}
    if not work.is_all:
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
    """A token for each row. It is a result, and so are the largest logits before and after edits.

    Of equals the first is the largest; NaN is larger than anything.
    """
    peaks, tokens = raw.max(-1)
    raw_peaks = peaks = peaks.float()
    edited = raw
    if work.edits:
        edited = raw.to(torch.float32, copy=True)
        make_edits(edited, sent)
        peaks, tokens = edited.max(-1)
    if lots is not None:
        for part, piece in lots.pieces(_rows_at_once(raw.shape[-1])):
            rows = piece if lots.is_first_rows else sent["lot_rows"][piece]
            tokens[rows] = draw(part, piece, edited[rows], peaks[rows], sent)
    for result in (tokens, raw_peaks, peaks) if work.edits else (tokens, raw_peaks):
        results.add(result)
    return tokens


def _by_num_top(wanted: list[Wanted], vocab_size: int) -> dict[int, list[int]]:
    """The rows that ask for as many likeliest tokens as each other."""
    found: dict[int, list[int]] = {}
    for row, num_top in wanted:
        found.setdefault(_capped(num_top, vocab_size), []).append(row)
    return found


def _num_top(rows: PromptRows, vocab_size: int) -> int:
    return _capped(rows.sequence.request.params.prompt_logprobs or 0, vocab_size)


def _capped(num_top: int, vocab_size: int) -> int:
    return vocab_size if num_top < 0 else min(num_top, vocab_size)


def _prompt_ids(rows: PromptRows, vocab_size: int) -> NDArray[np.int64]:
    """The tokens that follow these. Raises: IndexError for one without a logit."""
    first = rows.start + 1
    ids = np.array(rows.sequence.token_ids[first : first + rows.num_rows], np.int64)
    if ids.max(initial=0) >= vocab_size:
        raise IndexError(f"token {ids.max()} has no logit: there are {vocab_size}")
    return ids


def _rows_at_once(vocab_size: int) -> int:
    return max(1, _AT_ONCE // vocab_size)


def _pieces(rows: Tensor, num_rows: int) -> Iterator[tuple[int, Tensor]]:
    """Of so many at most, with where each begins."""
    for start in range(0, len(rows), num_rows):
        yield start, rows[start : start + num_rows]
