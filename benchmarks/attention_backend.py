"""The backend under test: what the product would choose here."""

from collections.abc import Callable

import torch
from torch import Tensor

from quire.attention import AttentionBackend, choose_backend
from quire.config import kernel_dir
from quire.kv import LayerView
from quire.spec import AttentionSpec

Writer = Callable[[Tensor, Tensor, Tensor], None]  # slots, k, v


def make_backend(spec: AttentionSpec) -> AttentionBackend:
    return choose_backend("auto", [spec], torch.device("cpu"), kernel_dir=kernel_dir())


def writer_of(backend: AttentionBackend) -> Callable[[LayerView], Writer] | None:
    """What it gives to a storage to write with; None where torch's indexing does."""
    return getattr(backend, "make_writer", None)
