"""A digest of modules in memory: their classes, their tensors, and all that they keep besides.

A model that was handed over says what it computes by its parameters and buffers, by plain
attributes (an adapter's scale, a window), and by the code of its classes. All of it is spelled out
as JSON has it, the same in each process, and what cannot be spelled out is refused.
"""

import functools
import json
import re
import sys
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from transformers import PreTrainedConfig

from quire.layers.watch import WeightsWatch
from quire.models.file_hashes import CannotName

# What modules and configurations keep that no forward function reads.
_NOT_READ = frozenset(
    {
        *("_name_or_path", "name_or_path", "base_model_name_or_path"),
        *("transformers_version", "generation_config"),
    }
)
_BOOKS = vars(nn.Module()).keys() - {"training"}
# Packages whose release is named elsewhere, Python's own, and Quire's, whose arithmetic has a
# number.
_NAMED_PACKAGES = {"torch", "transformers", "torchao", "quire", *sys.stdlib_module_names} - {
    "__main__"
}
_PLAIN = (bool, int, str)
_SHOWN = (float, complex, bytes, range, slice, torch.dtype)
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType, type(str.join))
_DEFINED = re.compile(r"^(?:def|class) (\w+)", re.MULTILINE)
_MOST_THREADS = 8


@final
class ModuleDigest:
    """Reads modules, and notes whose code they run."""

    def __init__(self) -> None:
        self._code: set[str] = set()  # names of Python's modules in packages without a release
        self._put: dict[str, str] = {}  # functions of theirs that stand elsewhere, by where
        self._seen: set[object] = set()  # classes and Python's modules that were looked through
        self._within: set[int] = set()  # ids of what is being spelled out
        self._names: dict[int, str] = {}  # of modules, by id
        self._tensors: dict[str, Tensor] = {}

    def of(self, model: nn.Module) -> str:
        """Return a SHA-256 of all of a model, 64 hex digits. Raises: CannotName."""
        self._refuse_hooks_of_all()
        if WeightsWatch(model).is_heard:
            raise CannotName(
                f"a module of {type(model).__name__} has hooks, or a forward function of its own"
            )
        modules = dict(model.named_modules())
        self._names = {id(module): name for name, module in modules.items()}
        kept = {name: self._module(module, name) for name, module in modules.items()}
        threads = max(1, min(torch.get_num_threads(), _MOST_THREADS))
        with ThreadPoolExecutor(threads, "quire-hash") as pool:
            found = pool.map(_of_tensor, self._tensors, self._tensors.values())
            numbers = dict(zip(self._tensors, found, strict=True))
        return digest({"modules": kept, "tensors": numbers})

    def meet(self, model: nn.Module) -> None:
        """Note whose code a model runs, without reading its tensors. Raises: CannotName."""
        self._refuse_hooks_of_all()
        for each in (*model.modules(), *model.parameters()):
            self._class(type(each))

    def code(self) -> dict[str, str]:
        """Return the SHA-256 of each noted source file, by the name that Python imports it by.

        Functions that were put in the place of others are there too, by those others' names.

        Raises: CannotName for code that lies in no file.
        """
        found = {}
        for name in sorted(self._code):
            path = getattr(sys.modules.get(name), "__file__", None)
            try:
                found[name] = sha256(Path(path or "").read_bytes()).hexdigest()
            except OSError:
                raise CannotName(f"the code of {name} lies in no file") from None
        return found | self._put

    def _refuse_hooks_of_all(self) -> None:
        if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
            raise CannotName("there are hooks of all modules, which may change what they say")

    # -- modules and tensors -----------------------------------------------------------------------

    def _module(self, module: nn.Module, name: str) -> dict[str, Any]:
        several = {**module._parameters, **module._buffers}
        return {
            "class": self._class(type(module)),
            "tensors": {
                own: None if tensor is None else self._tensor(tensor, f"{name}.{own}")
                for own, tensor in several.items()
            },
            "modules": {own: self._spelled(each, name) for own, each in module._modules.items()},
            "kept": {
                own: self._spelled(each, f"{name}.{own}")
                for own, each in vars(module).items()
                if own not in _BOOKS and own not in _NOT_READ
            },
        }

    def _tensor(self, tensor: Tensor, where: str) -> str:
        if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
            self._tensors[where] = tensor
            return where
        inside, how = tensor.__tensor_flatten__()  # a quantized one, as a rule
        for each in inside:
            self._tensor(getattr(tensor, each), f"{where}.{each}")
        shown = repr(how)
        if " at 0x" in shown:
            raise CannotName(f"{where} is a {type(tensor).__name__}, which has no text")
        return f"{self._class(type(tensor))} {shown}"

    # -- what modules keep -------------------------------------------------------------------------

    def _spelled(self, value: Any, where: str) -> Any:
        """Return a value as JSON has it. Raises: CannotName."""
        if value is None or type(value) in _PLAIN:
            return value
        if isinstance(value, _SHOWN):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, torch.device):
            return "device"  # another one rounds otherwise, and computes the same function
        if isinstance(value, Tensor):
            return self._tensor(value, where)
        if id(value) in self._names:
            return f"module {self._names[id(value)]}"
        own_id = id(value)
        if own_id in self._within:
            raise CannotName(f"{where} contains itself")
        self._within.add(own_id)
        try:
            if isinstance(value, PreTrainedConfig):
                return self._container(value.to_dict(), where)
            if isinstance(value, Mapping | list | tuple | set | frozenset):
                return self._container(value, where)
            if isinstance(value, _FUNCTIONS) or callable(value):
                return self._callable(value, where)
            return self._object(value, where)
        finally:
            self._within.remove(own_id)

    def _container(self, value: Any, where: str) -> list[Any]:
        if isinstance(value, Mapping):
            pairs = [
                [self._spelled(name, where), self._spelled(each, f"{where}.{name}")]
                for name, each in value.items()
                if name not in _NOT_READ
            ]
            return sorted(pairs, key=json.dumps)
        several = [self._spelled(each, f"{where}.{at}") for at, each in enumerate(value)]
        return several if isinstance(value, list | tuple) else sorted(several, key=json.dumps)

    def _callable(self, value: Any, where: str) -> Any:
        if isinstance(value, nn.Module):  # one that its owner does not list
            return self._module(value, where)
        if isinstance(value, types.MethodType):
            return [self._spelled(value.__func__, where), self._spelled(value.__self__, where)]
        if isinstance(value, functools.partial):
            return self._spelled([value.func, value.args, value.keywords], where)
        if not isinstance(value, _FUNCTIONS):
            return self._object(value, where)
        name = f"{getattr(value, '__module__', '')}.{value.__qualname__}"
        self._note_home(value, name)
        cells = getattr(value, "__closure__", None) or ()
        return [name, *(self._spelled(_closed_over(cell), where) for cell in cells)]

    def _object(self, value: Any, where: str) -> Any:
        kind = type(value)
        if isinstance(value, Enum):
            return [self._class(kind), value.name]
        if isinstance(value, types.ModuleType):
            self._note(value.__name__)
            return value.__name__
        if isinstance(value, re.Pattern):
            return [value.pattern, value.flags]
        if isinstance(value, str):  # and more
            return [self._class(kind), str(value)]
        if hasattr(value, "__dict__") and not any(vars(c).get("__slots__") for c in kind.__mro__):
            return [self._class(kind), self._container(vars(value), where)]
        raise CannotName(f"{where} is a {kind.__module__}.{kind.__qualname__}, which has no text")

    # -- code --------------------------------------------------------------------------------------

    def _class(self, kind: type) -> str:
        """Note a class's code, also what another file has put in its place."""
        for each in kind.__mro__:
            package = each.__module__.partition(".")[0]
            if each not in self._seen and package not in ("torch", "builtins"):
                self._seen.add(each)
                self._note(each.__module__)
                if issubclass(each, nn.Module):
                    for own, value in vars(each).items():
                        self._note_home(value, f"{each.__module__}.{each.__qualname__}.{own}")
                    self._note_file(each.__module__)
        return f"{kind.__module__}.{kind.__qualname__}"

    def _note_file(self, name: str) -> None:
        """Note where the functions and classes come from that a file defines."""
        module = sys.modules.get(name)
        path = getattr(module, "__file__", None)
        if name in self._seen or module is None or path is None:
            return
        self._seen.add(name)
        with suppress(OSError, UnicodeDecodeError):  # code in no file is refused in ``code``
            for defined in _DEFINED.findall(Path(path).read_text(encoding="utf-8")):
                self._note_home(vars(module).get(defined), f"{name}.{defined}")

    def _note_home(self, value: Any, where: str) -> None:
        """Note in which file a function or a class was written that is found under a name."""
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, staticmethod | classmethod):
            value = value.__func__
        while isinstance(value, types.FunctionType):
            self._note_other(value.__globals__.get("__name__"), value, where)
            value = vars(value).get("__wrapped__")
        if isinstance(value, type):
            self._note_other(value.__module__, value, where)

    def _note_other(self, home: str | None, value: Any, where: str) -> None:
        self._note(home)
        if home in self._code and not where.startswith(f"{home}."):
            self._put[where] = f"{home}.{value.__qualname__}"

    def _note(self, name: str | None) -> None:
        if name is not None and name.partition(".")[0] not in _NAMED_PACKAGES:
            self._code.add(name)


def digest(named: Any) -> str:
    """Return the SHA-256 of a value that JSON can have: 64 hex digits."""
    return sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _closed_over(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _of_tensor(where: str, tensor: Tensor) -> str:
    """Hash a tensor's type, shape and numbers. Raises: CannotName."""
    if tensor.is_meta or tensor.layout != torch.strided:
        raise CannotName(f"{where} has no numbers here: it is {tensor.layout} on {tensor.device}")
    try:
        flat = tensor.detach().cpu().contiguous().view(-1)
        data = flat.view(torch.uint8).numpy().data if flat.numel() else b""
    except (RuntimeError, TypeError) as error:
        raise CannotName(f"the numbers of {where} cannot be read: {error}") from None
    return f"{tensor.dtype} {list(tensor.shape)} {sha256(data).hexdigest()}"
