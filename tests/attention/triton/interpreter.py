"""Triton's interpreter, for the kernels of ``quire.attention.triton`` without a GPU.

It runs each operation in numpy. Lean, it takes a third of the time: a function that a kernel calls
finds the language as the kernel left it, and whole numbers are not checked for overflow. One test
has them checked (``checking_overflow``).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("a GPU was asked for: its kernels are compiled", allow_module_level=True)
pytest.importorskip("triton", reason="no triton here: it is made for Linux")

from triton.runtime import interpreter

from quire.attention.triton import TritonAttention
from quire.attention.triton import launch as tiles
from quire.attention.triton.launch import Tile

_FEW = ((512, Tile(rows=16, tokens=32, num_warps=4, buffers=1)),)
_MANY = ((512, Tile(rows=64, tokens=32, num_warps=4, buffers=1)),)


_patched: set[str] = set()


def _call(self: interpreter.InterpretedFunction, *args: Any, **options: Any) -> Any:
    module = self.fn.__module__
    if module.startswith("triton.") and module not in _patched:  # the kernel has patched its own
        interpreter._patch_lang(self.fn)
        _patched.add(module)
    return self.rewrite()(*args, **options)


def _check_overflow(wanted: bool) -> None:
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=wanted)


interpreter.InterpretedFunction.__call__ = _call
_check_overflow(False)


@contextmanager
def checking_overflow() -> Iterator[None]:
    """A sum or a product that 32 bits cannot hold fails."""
    _check_overflow(True)
    yield
    _check_overflow(False)


def backend() -> TritonAttention:
    return TritonAttention()


def shrink_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short sequences have several tiles, steps and splits."""
    monkeypatch.setattr(tiles, "_FEW_OF_CODES", _FEW)
    for name, table in (("FEW", _FEW), ("MANY", _MANY)):
        for kind in ("", "_PLAIN"):
            monkeypatch.setattr(tiles, f"{kind}_{name}", table)
    monkeypatch.setattr(tiles, "LEAST_STEPS", 1)
