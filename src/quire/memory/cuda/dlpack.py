"""Tensors over memory that torch knows nothing of: an address, a length and a device.

DLPack names the device, so torch does not ask whose the address is. (CUDA's array interface makes
it ask the driver, which cannot say before something is mapped there.)

Source: DLPack, include/dlpack/dlpack.h
"""

import ctypes
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    import torch

CPU = 1  # kDLCPU
CUDA = 2  # kDLCUDA
_UNSIGNED = 1  # kDLUInt


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def _make_deleter() -> Any:
    # Its names are its own: a tensor may die when this module has been taken apart already.
    cast, py_object, drop = ctypes.cast, ctypes.py_object, ctypes.pythonapi.Py_DecRef

    def delete(managed: Any) -> None:
        drop(cast(managed.contents.context, py_object))

    return ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))(delete)


_DELETER = _make_deleter()  # torch calls it, on any thread; ctypes takes Python's lock


@final
class _Export:
    """All that must live until the last tensor is gone; torch holds a reference, by ``context``."""

    __slots__ = ("managed", "owner", "shape")

    def __init__(self, address: int, nbytes: int, device: tuple[int, int], owner: object) -> None:
        self.owner = owner
        self.shape = (ctypes.c_int64 * 1)(nbytes)
        dtype = _DataType(_UNSIGNED, 8, 1)
        tensor = _Tensor(address, _Device(*device), 1, dtype, self.shape)
        self.managed = _Managed(tensor, id(self), ctypes.cast(_DELETER, ctypes.c_void_p))
        for kept in (self, _DELETER):  # the deleter for ever: it cannot free itself while it runs
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def bytes_at(address: int, nbytes: int, device: tuple[int, int], owner: object) -> "torch.Tensor":
    """A flat uint8 tensor. ``owner`` is kept until the last tensor that shares its memory dies.

    ``device`` is DLPack's: its kind (``CPU``, ``CUDA``) and its number.
    """
    from torch.utils.dlpack import from_dlpack

    make_capsule = ctypes.pythonapi.PyCapsule_New
    make_capsule.restype = ctypes.py_object
    make_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    export = _Export(address, nbytes, device, owner)
    capsule = make_capsule(ctypes.addressof(export.managed), b"dltensor", None)
    tensor: torch.Tensor = from_dlpack(capsule)
    return tensor
