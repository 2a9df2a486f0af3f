"""The ranks of a model on one machine, as torch.distributed sees them: by gloo, or NCCL on CUDA.

They find each other through a file in a folder that only this user can read: no port is opened for
it, and no variable of the environment says where.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from quire.config import as_rank, names_threads
from quire.devices import on_device
from quire.engine.parallel.messages import Join
from quire.errors import ConfigError

# -- torch.distributed -----------------------------------------------------------------------------


log = logging.getLogger(__name__)

_BACKENDS = (("cpu", "gloo"), ("cuda", "nccl"))
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def refuse_ranks(num_ranks: int, device_type: str) -> None:
    """Raises: ConfigError where this process, or this machine, cannot have so many ranks."""
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
            f"'quire[tp]'"
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
    """For whatever makes groups of ranks: joining, and loading a model's part.

    The device of its number becomes the current one. In rank 0, which is the user's process, that
    ends here.
    """
    with as_rank(rank, _LOOPBACK), nullcontext() if rank else _current_device_kept():
        yield


def _current_device_kept() -> AbstractContextManager[object]:
    """Without CUDA, or before it is used, no device has been chosen."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return nullcontext()
    return on_device(torch.device("cuda", torch.cuda.current_device()))


def join(message: Join) -> None:
    """Raises: RuntimeError where the others do not come in time."""
    device = None
    with meeting(message.rank):
        if message.device_type == "cuda":
            torch.cuda.set_device(message.rank)
            device = torch.device("cuda", message.rank)
        dist.init_process_group(
            dict(_BACKENDS)[message.device_type],
            store=FileStore(str(message.store), message.num_ranks),
            rank=message.rank,
            world_size=message.num_ranks,
            timeout=timedelta(seconds=message.timeout_s),
            device_id=device,
        )
        # The first exchange connects them: a rank that cannot be reached is found out here.
        dist.all_reduce(torch.zeros(1, device=device or "cpu"))


def leave() -> None:
    """Be in no group any more, where all others leave too."""
    if dist.is_initialized():
        dist.destroy_process_group()


def abort() -> None:
    """End every exchange under way, for a rank that takes part in it is gone. Never raises."""
    if not dist.is_initialized():
        return
    try:
        dist.distributed_c10d._abort_process_group()
    except Exception as error:  # it is the end of the group in any case
        log.debug("the process group is not aborted: %r", error)


# -- ranks' threads --------------------------------------------------------------------------------

# Threads of ranks that share a machine's cores: each computes with its share of them.


def share_of_threads(num_ranks: int) -> int | None:
    """Of those that this process computes with; None where the user has named a number for each."""
    if names_threads():
        return None
    return max(1, torch.get_num_threads() // num_ranks)


def compute_with(num_threads: int) -> Callable[[], None]:
    """From now on, in this thread and those that begin later. What comes back undoes it, in the
    same way, unless another number has been set since.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    log.info("this rank computes with %d of %d threads", num_threads, before)

    def undo() -> None:
        if torch.get_num_threads() == num_threads:
            torch.set_num_threads(before)

    return undo
