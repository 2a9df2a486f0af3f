"""The ranks of a model on one machine, as torch.distributed sees them: by gloo, or NCCL on CUDA.

The ranks find each other through a file in a folder that only this user can read. They open no
port for it, and no environment variable names it.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from quire.config import as_rank, names_threads
from quire.devices import on_device
from quire.errors import ConfigError

log = logging.getLogger(__name__)

_BACKENDS = (("cpu", "gloo"), ("cuda", "nccl"))
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def refuse_ranks(num_ranks: int, device_type: str) -> None:
    """Refuse more ranks than this process or machine can have. Raises: ConfigError."""
    option = f"tensor_parallel_size={num_ranks}"
    if not dist.is_available():
        raise ConfigError(f"{option}: this build of torch has no torch.distributed")
    if dist.is_initialized():
        raise ConfigError(
            f"{option}: this process is in a process group of torch.distributed already; Quire "
            f"starts its ranks itself: not under torchrun, and one such model at a time"
        )
    if find_spec("accelerate") is None:
        raise ConfigError(
            f"{option}: Transformers loads parts of a model with accelerate: pip install "
            f"'quire-kv[tp]'"
        )
    if device_type == "cuda":
        there = torch.cuda.device_count()
        if num_ranks > there:
            raise ConfigError(
                f"{option} is more than the {there} CUDA devices here: lower it, each rank takes "
                f"one"
            )
    elif torch.cuda.is_available():
        raise ConfigError(
            f"{option} on the CPU: Transformers would place the parts on the CUDA devices here; "
            f"hide them (CUDA_VISIBLE_DEVICES=)"
        )
    backend = dict(_BACKENDS)[device_type]
    if not dist.is_backend_available(backend):
        raise ConfigError(f"{option}: this build of torch has no {backend}")


@contextmanager
def meeting(rank: int) -> Iterator[None]:
    """Let a rank join, or load its part of a model, with the device of its number as current one.

    In rank 0, which is the user's process, the current device is restored.
    """
    with as_rank(rank, _LOOPBACK), nullcontext() if rank else _current_device_kept():
        yield


def _current_device_kept() -> AbstractContextManager[object]:
    """Restore the current CUDA device, if CUDA is in use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext()
    return on_device(torch.device("cuda", torch.cuda.current_device()))


def join(rank: int, num_ranks: int, store: Path, device_type: str, timeout_s: float) -> None:
    """Join the process group. ``store`` is a file that all ranks can see.

    Raises: RuntimeError where the other ranks do not join within ``timeout_s`` seconds.
    """
    device = None
    with meeting(rank):
        if device_type == "cuda":
            torch.cuda.set_device(rank)
            device = torch.device("cuda", rank)
        dist.init_process_group(
            dict(_BACKENDS)[device_type],
            store=FileStore(str(store), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
            device_id=device,
        )
        # The first exchange connects the ranks: one that cannot be reached fails here.
        dist.all_reduce(torch.zeros(1, device=device or "cpu"))


def leave() -> None:
    """Leave the process group, as all other ranks do."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort() -> None:
    """Abort the exchange under way after a rank has ended. It raises nothing."""
    if not dist.is_initialized():
        return
    try:
        dist.distributed_c10d._abort_process_group()
    except Exception as error:
        log.debug("the process group is not aborted: %r", error)


def share_of_threads(num_ranks: int) -> int | None:
    """Return a rank's share of this process's threads; None where the user has set a number."""
    if names_threads():
        return None
    return max(1, torch.get_num_threads() // num_ranks)


def compute_with(num_threads: int) -> Callable[[], None]:
    """Compute with ``num_threads``, in this thread and in those that begin later.

    Return a function that undoes it, unless another number has been set since.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    log.info("this rank computes with %d of %d threads", num_threads, before)

    def undo() -> None:
        if torch.get_num_threads() == num_threads:
            torch.set_num_threads(before)

    return undo
