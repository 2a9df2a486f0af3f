"""What decides the bits that a batch-invariant pass computes, beside the model and its dtype."""

from pathlib import Path

from quire.attention import cpu as attention
from quire.kernels.compile import code_digest, usable_isa
from quire.layers import cpu as layers


def order_of_sums() -> str:
    """Name it: the kernels' sources, their compiler, and the CPU that they are compiled for."""
    folders = (Path(str(module.__file__)).parent for module in (attention, layers))
    return code_digest(usable_isa(), *folders)
