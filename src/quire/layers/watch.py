"""What modules compute by, and whether it is still what it was: looked at before every pass.

A module's Python reads its own attributes and those of what it keeps (configurations, lists,
functions), its class, and names of the file that its class is in. All of it is followed once, and
copied, each container by itself. To compare everything with its copy is then to compare two lists,
which Python does in C, and identity comes first.

The numbers in a tensor are not compared: operators read them where they are. What cannot be
followed is named in ``unseen``: objects of another language, or more than can be compared in time.
"""

import inspect
import logging
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from enum import Enum
from functools import partial
from operator import attrgetter, call, getitem, is_, itemgetter
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

Place: TypeAlias = tuple[int, Hashable]  # the id of what keeps something, and under which name

_PLAIN = (int, float, complex, str, bytes, type(None), type(...), range, slice, Enum)
_LEAVES = (
    *(type, ModuleType, BuiltinFunctionType, type(str.join), CodeType, re.Pattern, PurePath),
    *(logging.Logger, torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_CONTAINERS = (dict, list, tuple, set, frozenset)
# What most values are: asked before the others, for there are thousands in a model.
_MOST = frozenset({bool, int, float, str, type(None), type, torch.dtype, torch.device})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# What torch keeps in every module besides: a pass without gradients does not read it.
_DICTIONARIES = ("_parameters", "_buffers", "_modules", *_HOOKS)
_BOOKS = vars(nn.Module()).keys() - {*_DICTIONARIES, "training"}
_MOST_ENTRIES = 10_000  # of one container


class _Read(NamedTuple):
    """Some of what an object keeps: for a dictionary in the order of ``names``."""

    source: Any
    names: tuple[str, ...]
    get: Callable[[Any], Any]
    found: tuple[Any, ...]


FileReads: TypeAlias = dict[int, tuple[_Read, ...]]  # by the id of a class, or of a file's names


class WeightsWatch:
    """Of modules, or functions, and all that they reach, but for some places: those ``apart``.

    ``file_reads`` keeps what classes and their files' functions read. Watches with nothing apart
    that are made one after the other share it, and each is looked through once: what changes
    between them, the later ones take for changed.
    """

    def __init__(
        self,
        *several: nn.Module | FunctionType,
        apart: frozenset[Place] = frozenset(),
        file_reads: FileReads | None = None,
    ) -> None:
        self.unseen: dict[str, None] = {}  # what could not be followed, each kind once
        self.is_heard = False  # its owner listens to a module, or does what it does in its place
        self._apart = apart
        self._file_reads: FileReads = {} if file_reads is None or apart else file_reads
        self._within: set[int] = set()  # the ids of containers that are being copied
        self._met: dict[int, object] = {}  # by id: no other object has it as long as this one lives
        self._waiting: list[object] = []
        self._files: dict[int, dict[str, Any]] = {}
        self._reads: list[_Read] = []
        self._getters: dict[tuple[str, ...], Callable[[Any], Any]] = {}
        self._sized: list[Any] = []  # in which nothing may be that was not there
        # What an equal one could not stand for: by its container and its key there.
        self._only: list[tuple[Any, Any, Any]] = []
        self._empty: list[dict[Any, Any]] = []
        self._modules: list[nn.Module] = []
        self._tensors: list[Tensor] = []
        for each in several:
            self._meet(each)
        self._follow()
        for names in self._files.values():
            self._file(names)
        self._types = [*map(type, self._modules)]
        self._sizes = [*map(len, self._sized)]
        self._gets, self._sources, self._found = (
            [*map(attrgetter(name), self._reads)] for name in ("get", "source", "found")
        )
        self._owners, self._keys, self._values = (
            [*map(itemgetter(n), self._only)] for n in range(3)
        )

    def holds(self) -> bool:
        """Tell whether all of it is what it was."""
        try:
            return (
                [*map(len, self._sized)] == self._sizes
                and [*map(call, self._gets, self._sources)] == self._found
                and all(map(is_, map(getitem, self._owners, self._keys), self._values))
                and [*map(type, self._modules)] == self._types
                and not any(self._empty)
            )
        except Exception:  # something has gone, or cannot even be compared with what was there
            return False

    def places(self) -> list[int]:
        """List the addresses of its tensors."""
        return [*map(Tensor.data_ptr, self._tensors)]

    def changed(self) -> frozenset[Place]:
        """Return the places of what is not what it was."""
        found: set[Place] = set()
        for source, names, get, before in self._reads:
            if names:
                pairs = zip(names, before, strict=False)
                found |= {(id(source), n) for n, was in pairs if not _same(source.get(n), was)}
            elif not _same(get(source), before):
                found.add((id(source), ""))
        for owner, key, only in self._only:
            if isinstance(owner, dict) and owner.get(key) is not only:
                found.add((id(owner), key))
        return frozenset(found)

    # -- what is reached --------------------------------------------------------------------------

    def _meet(self, value: object) -> None:
        if id(value) not in self._met:
            self._met[id(value)] = value
            self._waiting.append(value)

    def _follow(self) -> None:
        while self._waiting:
            value = self._waiting.pop()
            if isinstance(value, nn.Module):
                self._module(value)
            elif isinstance(value, FunctionType):
                self._function(value)
            elif isinstance(value, MethodType):
                self._copy((value.__func__, value.__self__), None, None)
            elif isinstance(value, partial):
                self._copy((value.func, value.args, value.keywords), None, None)
            elif hasattr(value, "__dict__") and not _has_slots(type(value)):
                self._named(vars(value))
            else:
                self._cannot_see(f"a {type(value).__module__}.{type(value).__qualname__}")

    def _cannot_see(self, what: str) -> None:
        self.unseen[what] = None

    def _module(self, module: nn.Module) -> None:
        self._modules.append(module)
        attributes = vars(module)
        own = {name: value for name, value in attributes.items() if name not in _BOOKS}
        for name in _DICTIONARIES:
            if inside := own[name]:
                self.is_heard |= name in _HOOKS
                self._named(inside)
            else:
                self._empty.append(inside)
        self.is_heard |= "forward" in own
        copies = {
            name: self._copy(value, attributes, name)
            for name, value in own.items()
            if name not in _DICTIONARIES
        }
        self._sized.append(attributes)
        self._some(attributes, {**own, **copies})
        self._class(type(module))

    def _class(self, kind: type) -> None:
        """By its own names and those of its file, and likewise the bases that have a forward."""
        inherits = True  # its forward: one that is added to the class would be called instead
        for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            names = getattr(inspect.unwrap(vars(each).get("forward", len)), "__globals__", None)
            if names is None and inherits:
                names = vars(sys.modules.get(each.__module__, torch))
            inherits &= "forward" not in vars(each)
            if names is None or id(each) in self._met:
                continue
            self._met[id(each)] = each
            self._sized.append(vars(each))
            if id(each) not in self._file_reads:
                num_before = len(self._reads)
                self._some(vars(each), {name: _copied(value) for name, value in vars(each).items()})
                self._file_reads[id(each)] = tuple(self._reads[num_before:])
            else:
                self._reads += self._file_reads[id(each)]
            self._code_of(names)

    def _function(self, function: FunctionType) -> None:
        """By what it is given by default and has closed over, and the names of its file."""
        several: list[tuple[Any, Callable[[Any], Any]]] = [(function, _given)]
        several += [(cell, _inside) for cell in function.__closure__ or ()]
        for source, get in several:
            if (id(source), "") not in self._apart:
                found = self._copy(get(source), source, None)
                self._reads.append(_Read(source, (), get, found))
        self._code_of(function.__globals__)

    def _code_of(self, names: dict[str, Any]) -> None:
        if not _is_torchs(names.get("__name__", "")):
            self._files[id(names)] = names

    def _file(self, names: dict[str, Any]) -> None:
        """Names that functions of a file read: its own, and those of modules that it names."""
        if id(names) not in self._file_reads:
            read = frozenset(name for value in names.values() for name in _read_by(value, names))
            modules = [value for value in names.values() if isinstance(value, ModuleType)]
            num_before = len(self._reads)
            for outside in (names, *(vars(m) for m in modules if not _is_torchs(m.__name__))):
                wanted = read & outside.keys()
                self._some(outside, {name: _copied(outside[name]) for name in wanted})
            self._file_reads[id(names)] = tuple(self._reads[num_before:])
        else:
            self._reads += self._file_reads[id(names)]

    def _named(self, live: dict[Any, Any]) -> None:
        """All that an object keeps."""
        self._sized.append(live)
        self._some(live, {name: self._copy(value, live, name) for name, value in live.items()})

    def _some(self, source: Mapping[Any, Any], wanted: dict[Any, Any]) -> None:
        names = tuple(wanted)
        if self._apart:
            names = tuple(name for name in names if (id(source), name) not in self._apart)
        several = names if len(names) != 1 else names * 2  # of one a getter gives no tuple
        if names:
            # One for all modules of a class: in the caches it is found once, and not for each.
            get = self._getters.setdefault(several, itemgetter(*several))
            found = tuple(wanted[name] for name in several)
            self._reads.append(_Read(source, several, get, found))

    def _copy(self, value: Any, owner: Any, key: Any) -> Any:
        """What a value is compared with: itself, or of a container a copy."""
        if type(value) in _MOST or isinstance(value, (*_PLAIN, *_LEAVES)):
            return value
        if isinstance(value, Tensor):
            if id(value) not in self._met:
                self._met[id(value)] = value
                self._tensors.append(value)
            if value.numel() == 1:  # another one could be equal
                self._only.append((owner, key, value))
            return value
        if not isinstance(value, _CONTAINERS):
            if any("__eq__" in vars(kind) for kind in type(value).__mro__[:-1]):
                self._only.append((owner, key, value))
            self._meet(value)
            return value
        if len(value) > _MOST_ENTRIES:
            self._cannot_see(f"a {type(value).__name__} of {len(value):,} entries")
            return value
        if isinstance(value, dict | list | tuple):
            return self._copy_of(value)
        if not all(isinstance(each, (*_PLAIN, *_LEAVES)) for each in value):
            self._cannot_see("a set of something else than plain values")
        return set(value)

    def _copy_of(self, container: Any) -> Any:
        """Entry by entry."""
        if id(container) in self._within:
            self._cannot_see(f"a {type(container).__name__} that contains itself")
            return container
        self._within.add(id(container))
        try:
            if isinstance(container, dict):
                return {n: self._copy(each, container, n) for n, each in container.items()}
            copies = [self._copy(each, container, n) for n, each in enumerate(container)]
            return copies if isinstance(container, list) else tuple(copies)
        finally:
            self._within.remove(id(container))


def _same(now: Any, before: Any) -> bool:
    try:
        return now is before or bool(now == before)
    except Exception:  # two tensors
        return False


def _given(function: FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _inside(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing has been closed over yet
        return ()


def _copied(value: Any) -> Any:
    """Of a container a copy, for what is in it to be compared one by one."""
    if type(value) in _MOST or not isinstance(value, _CONTAINERS) or len(value) > _MOST_ENTRIES:
        return value
    if isinstance(value, dict):
        return {name: _copied(each) for name, each in value.items()}
    kind = next(kind for kind in _CONTAINERS[1:] if isinstance(value, kind))
    return kind(map(_copied, value))


def _has_slots(kind: type) -> bool:
    """Whether an object keeps something where its names do not tell of it."""
    own = (vars(each).get("__slots__", ()) for each in kind.__mro__)
    return any(slots for slots in own if slots != ("__weakref__",))


def _is_torchs(name: str) -> bool:
    return name.partition(".")[0] == "torch"


def _read_by(value: Any, names: dict[str, Any]) -> Iterable[str]:
    """Names that code of a file reads: that of a function, or of a class's."""
    if isinstance(value, type):
        if value.__module__ == names.get("__name__"):
            for each in vars(value).values():
                if not isinstance(each, type):
                    yield from _read_by(each, names)
        return
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    function = inspect.unwrap(value) if callable(value) else None
    if isinstance(function, FunctionType) and function.__globals__ is names:
        waiting = [function.__code__]
        while waiting:
            code = waiting.pop()
            yield from code.co_names
            waiting += (const for const in code.co_consts if isinstance(const, CodeType))
