"""Weights in huge pages.

A checkpoint's weights are mapped from its files, in pages of 4 KiB. Every step reads all of them,
and finding out where so many small pages lie takes an eighth of the time that it takes to read
them. So they are copied into huge pages, and the file's are let go on the way.
"""

import logging
from itertools import pairwise

from torch import Tensor
from transformers import PreTrainedModel

from quire.errors import MemoryUnavailable
from quire.memory.huge import huge_pieces, let_go
from quire.memory.machine.probe import available_bytes, mapped_from_files
from quire.units import format_bytes

log = logging.getLogger(__name__)

_SPARE = 1.25  # so many times the weights must be free: something is to be left for a cache


def hold_in_memory(model: PreTrainedModel) -> int:
    """Copy weights that are mapped from files into memory of this process; how many bytes.

    Nothing is copied where the machine has no huge pages, or too little memory.
    """
    mapped = _mapped(model)
    total = sum(tensor.nbytes for tensor in mapped.values())
    if not total:
        return 0
    try:
        if (left := available_bytes()) < _SPARE * total:
            raise MemoryUnavailable(f"{format_bytes(left)} is free")
        pieces = huge_pieces([tensor.nbytes for tensor in mapped.values()])
    except MemoryUnavailable as reason:
        log.info("%s of weights stay in their files: %s", format_bytes(total), reason)
        return 0
    held: dict[int, Tensor] = {}
    for (place, tensor), piece in zip(mapped.items(), pieces, strict=True):
        held[place] = piece.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        let_go(place, tensor.nbytes)
    for parameter in model.parameters():
        if parameter.data_ptr() in held:
            parameter.data = held[parameter.data_ptr()]
    log.info("%s of weights copied into huge pages", format_bytes(total))
    return total


def _mapped(model: PreTrainedModel) -> dict[int, Tensor]:
    """Weights in mappings of files, by their addresses; nothing where two share but a part."""
    found: dict[int, Tensor] = {}
    for parameter in model.parameters():
        tensor = parameter.data
        if type(tensor) is not Tensor or not tensor.is_cpu or not tensor.is_contiguous():
            return {}
        other = found.setdefault(tensor.data_ptr(), tensor)
        if (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            return {}
    spans = sorted((place, place + tensor.nbytes) for place, tensor in found.items())
    if any(stop > start for (_, stop), (start, _) in pairwise(spans)):
        return {}
    on_files = mapped_from_files(found)
    return {place: tensor for place, tensor in found.items() if place in on_files}
