"""Whether what a model has torch compute takes each token by itself, so that its bits are the same.

A batch-invariant pass multiplies and attends by kernels of ours, and norms, rotations and gated
layers are ours, too. What is left to torch is looked at here, operator by operator, while the model
runs. Some give a row the same bits whatever other rows there are: those that only move numbers,
those that round once, and sums along a row. Others do not, or may not: products choose the order of
their sums by the number of rows, and some functions are computed otherwise in the last few elements
of a thread's share. An operator that is not known is not trusted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.errors import UnsupportedModel

# One rounding each, or none: a vector's lane computes what a single element's code computes.
_ROUND_ONCE = frozenset((
    "abs", "bitwise_and", "bitwise_not", "bitwise_or", "ceil", "clamp", "clamp_max", "clamp_min",
    "div", "eq", "fill", "floor", "ge", "gt", "le", "logical_and", "logical_not", "logical_or",
    "lt", "masked_fill", "maximum", "minimum", "mul", "ne", "neg", "reciprocal", "relu", "round",
    "sign", "sqrt", "square", "trunc", "where", "zero",
))  # fmt: skip
# They move numbers, make new ones, or change their dtype.
_MOVE = frozenset((
    "_to_copy", "alias", "arange", "cat", "clone", "constant_pad_nd", "copy",
    "detach", "embedding", "empty", "empty_like", "empty_strided", "expand", "full", "full_like",
    "gather", "index", "index_copy", "index_put", "index_select", "lift_fresh", "masked_scatter",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like",
    "pad", "repeat", "repeat_interleave", "roll", "scalar_tensor", "scatter", "slice_scatter",
    "split", "split_with_sizes", "stack", "to", "tril", "triu", "type_as", "unbind", "zeros",
    "zeros_like",
))  # fmt: skip
_SUMS = frozenset(("add", "sub", "rsub"))
_POWERS = (1, 2, 0.5, -1)  # rounded once, too
# By vectors up to the end of a thread's share, which silu, gelu and sigmoid are not. Compared for
# all lengths to 70: tests/models/test_row_watch.py.
_BY_VECTORS = frozenset(("cos", "sin", "tanh", "exp", "erf", "log"))
# Along the last dimension: each row's sum is taken by itself, in one order.
_ALONG_ROWS = frozenset(("mean", "sum", "amax", "amin", "argmax", "var", "_softmax", "softmax"))
_SHARED_ROW = 2**15  # elements of a single row from which several threads add it up
_NORMS = frozenset(("native_layer_norm", "layer_norm", "rms_norm"))
_ROW_WISE = _ROUND_ONCE | _MOVE | _BY_VECTORS | _NORMS  # whatever they are given
_LOOKED_AT = 2  # of the passes
_PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "linear", "matmul"))


class RowsApart:
    """Looks at a model's second pass: in the first one stand-ins are still tried.

    Again when the model has changed: a version is a number of its watch.
    """

    def __init__(self) -> None:
        self._version = -1
        self._passes = 0

    @contextmanager
    def required(self, version: int) -> Iterator[None]:
        """Look at a pass of the model's of that version.

        Raises: UnsupportedModel if rows are mixed in it, with the operators.
        """
        if version != self._version:
            self._version, self._passes = version, 0
        self._passes += 1
        if self._passes != _LOOKED_AT:
            yield
            return
        with _RowWatch() as watch:
            yield
        if watch.found:
            self._passes = 1  # it is looked at again
            raise UnsupportedModel(
                f"batch_invariant: torch computes what may differ from batch to batch: "
                f"{'; '.join(watch.found)}"
            )


class _RowWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, notes the operators that may mix rows, or give a row other bits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, None] = {}  # each once, in order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _is_row_wise(func, args, kwargs):
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            shapes = ", ".join(str(list(x.shape)) for x in given)
            self.found[f"{func._schema.name.removeprefix('aten::')} of {shapes}"] = None
        return result


def _is_row_wise(func: Any, args: Any, kwargs: Any) -> bool:
    namespace, _, name = func._schema.name.partition("::")
    name = name.removesuffix("_")
    if namespace not in ("aten", "prims"):
        return False
    if func.is_view or name in _ROW_WISE:
        return True
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if name in _SUMS:
        return kwargs.get("alpha", 1) in (1, -1)
    if name == "rsqrt":  # in 16 bits a single element is rounded twice
        return given[0].itemsize > 2
    if name == "dropout":  # which a model that is served leaves out
        return not args[2]
    if name == "pow":
        is_root = args[-1] == -0.5 and given[0].itemsize > 2  # as rsqrt
        return len(given) == 1 and (args[-1] in _POWERS or is_root)
    if name in _PRODUCTS:  # of one number each
        left = given[-2]
        return left.shape[-1] == 1
    if name in _ALONG_ROWS:
        return _is_along_rows(given[0], args, kwargs)
    # Routers and masks count and compare whole numbers, exactly.
    return bool(given) and not any(x.is_floating_point() for x in given)


def _is_along_rows(given: Tensor, args: Any, kwargs: Any) -> bool:
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if isinstance(dims, int):
        dims = [dims]
    last = given.dim() - 1
    alone = isinstance(dims, list | tuple) and [d % given.dim() for d in dims] == [last]
    return alone and given.is_contiguous() and given.shape[-1] < _SHARED_ROW
