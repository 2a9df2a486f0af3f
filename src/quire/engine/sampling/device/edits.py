"""The changes of ``sampling.edits`` on a device: the same operations, so the same bits.

Ids and counts of a long text are many, so they travel as 32 bits each, and the rows that they
belong to as one length a row.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.engine.sampling.edits import Edits, Ids

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
