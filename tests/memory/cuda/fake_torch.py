"""A GPU as far as ``torch.cuda`` is asked about its memory; no tensor can be there."""

from types import SimpleNamespace

import pytest
import torch

GIB = 2**30


class FakeCuda:
    """What is asked of ``torch.cuda``."""

    def __init__(self) -> None:
        self.free_bytes, self.total_bytes, self.own_bytes = 5 * GIB, 8 * GIB, GIB
        self.peak_bytes, self.error = 0, ""
        self.num_emptied = 0

    def mem_get_info(self, index: int) -> tuple[int, int]:
        if self.error:
            raise RuntimeError(self.error)
        return self.free_bytes, self.total_bytes

    def empty_cache(self) -> None:
        self.num_emptied += 1


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Two devices that say the same."""
    fake = FakeCuda()
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 0,
        "mem_get_info": fake.mem_get_info,
        "get_device_name": lambda index: f"fake {index}",
        "memory_reserved": lambda index: fake.own_bytes,
        "memory_allocated": lambda index: fake.own_bytes,
        "max_memory_allocated": lambda index: fake.peak_bytes,
        "reset_peak_memory_stats": lambda index: None,
        "synchronize": lambda index: None,
        "empty_cache": fake.empty_cache,
        "current_stream": lambda index: SimpleNamespace(cuda_stream=7),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return fake
