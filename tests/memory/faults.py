"""The system's calls under ``quire.memory.host``, made to fail by number.

Every call of Python's ``mmap`` and ``os`` modules and of the C library that memory makes goes
through a ``Faults``, which counts it and fails it in its turn, without having made it.
"""

import ctypes
import mmap
import os
import types
from typing import Any

import pytest

_FAILED = {"mmap": ctypes.c_void_p(-1).value}  # what the C library returns; -1 otherwise


class Faults:
    """Fails call number ``first`` with ``number``; if ``lasting`` all later ones, but for some."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.disarm()

    def arm(self, first: int, number: int, *, lasting: bool = False, except_for: str = "") -> None:
        self.calls.clear()
        self._first, self._number, self._lasting = first, number, lasting
        self._except_for = except_for

    def disarm(self) -> None:
        self.arm(0, 0)

    def strike(self, name: str) -> int:
        """Count a call; the error number it fails with, or 0."""
        self.calls.append(name)
        here = len(self.calls)
        fails = here == self._first or (self._lasting and 0 < self._first <= here)
        return self._number if fails and name != self._except_for else 0

    def wrap(self, name: str, real: Any) -> Any:
        """A Python function that fails by raising OSError."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if number := self.strike(name):
                raise OSError(number, os.strerror(number))
            return real(*args, **kwargs)

        return call


class Library:
    """Stands for ``ctypes.CDLL``: its functions fail as the C library's do."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._real = ctypes.CDLL(None, use_errno=True)

    def __getattr__(self, name: str) -> "Function":
        return Function(self._faults, name, self._real[name])


class Function:
    """One of its functions. ``restype`` and ``argtypes`` are the real one's."""

    def __init__(self, faults: Faults, name: str, real: Any) -> None:
        self.__dict__.update(_faults=faults, _name=name, _real=real)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real, name, value)

    def __call__(self, *args: Any) -> Any:
        if number := self._faults.strike(self._name):
            ctypes.set_errno(number)
            return _FAILED.get(self._name, -1)
        return self._real(*args)


def install(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Put a Faults under every module of memory that makes calls."""
    faults = Faults()

    class Mapping(mmap.mmap):
        def __new__(cls, *args: Any, **kwargs: Any) -> "Mapping":
            if number := faults.strike("mmap"):
                raise OSError(number, os.strerror(number))
            return super().__new__(cls, *args, **kwargs)

        def madvise(self, *args: int) -> None:
            if number := faults.strike("madvise"):
                raise OSError(number, os.strerror(number))
            super().madvise(*args)

    def stand_in(module: Any, **names: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(**{**vars(module), **names})

    c = stand_in(ctypes, CDLL=lambda *_, **__: Library(faults))
    files = {name: faults.wrap(name, getattr(os, name)) for name in ("memfd_create", "ftruncate")}
    for name, module in {
        "memory.mmap": stand_in(mmap, mmap=Mapping),
        "syscalls.ctypes": c,
        "heaps.mmap": stand_in(mmap, mmap=Mapping),
        "heaps.ctypes": c,
        "heaps.os": stand_in(os, **files),
    }.items():
        monkeypatch.setattr(f"quire.memory.host.{name}", module)
    return faults
