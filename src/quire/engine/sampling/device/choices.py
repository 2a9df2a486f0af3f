"""A step's work where the logits lie: all of it is set going, and then waited for once.

What the host has to say goes over first, in one copy. No value that is on the device decides what
is done there, so nothing has to come back in between. Rows are worked on in pieces, which bounds
what is held beside the logits.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Several
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.devices.results import Results
from quire.devices.staging import to_device
from quire.engine.plan import PromptRows
from quire.engine.sampling.device.edits import edits_to_send, make_edits
from quire.engine.sampling.device.logprobs import described
from quire.engine.sampling.device.lots import Lots, draw
from quire.engine.sampling.work import Wanted, Work
from quire.engine.sequence import TokenLogprobs

# Logits. While its row is drawn or told of, up to 20 bytes are held for each, and what the device's
# own sorting takes. The edited ones of all rows come on top.
_AT_ONCE = 2**23
_READ_AS_THEY_ARE = (torch.float32, torch.bfloat16, torch.float16)

Sent = Mapping[str, Tensor]


@final
class DeviceChoices:
    @torch.no_grad()
    def __init__(self, logits: Tensor, work: Work) -> None:
        if logits.dtype not in _READ_AS_THEY_ARE:
            logits = logits.float()
        vocab_size, device = logits.shape[-1], logits.device
        lots = Lots(work.lots, vocab_size) if work.lots else None
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
    work: Work, lots: Lots | None, asked: Mapping[int, list[int]], vocab_size: int
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


def _choose(raw: Tensor, work: Work, lots: Lots | None, sent: Sent, results: Results) -> Tensor:
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
