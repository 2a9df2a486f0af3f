"""Triton's interpreter on the device that is not there: it runs kernels on the tensors inside."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._pytree import tree_leaves

from pretend import PretendTensor
from pretend.tensor import FAR

interpreter = pytest.importorskip("triton.runtime.interpreter")


def launch_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched, counted and captured as others are."""
    own = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **options: Any) -> None:
        found = next(x for x in tree_leaves(args) if isinstance(x, PretendTensor))

        def kernel(*inner: Any) -> None:
            own(self, *inner, **options)

        # Addresses are numbers, and those of the device are far from where its memory lies.
        near = (x - FAR if type(x) is int and x >= FAR else x for x in args)
        found.gpu.kernel(kernel, *near)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", call)
