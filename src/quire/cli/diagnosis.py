"""Find what ``quire doctor`` reports: a model's needs, this machine, and each rule's ledger."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.config import EngineConfig
from quire.errors import QuireError
from quire.memory import HostMemory
from quire.memory.budget import BUDGETS, Ledger, Needs
from quire.memory.host.syscalls import why_no_locks
from quire.memory.machine import DeviceMemory, Machine, cuda_devices, read_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """A GPU that is visible to this process."""

    memory: DeviceMemory | None  # None: the driver does not report it
    why_not: str | None  # the reason why it cannot hold KV memory
    rules: tuple[Ledger, ...] = ()  # of each budget rule, for the model on this GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A model, a machine, and the budget that each rule gives the one on the other."""

    name: str  # of the model
    needs: Needs
    sequence_bytes: int  # of KV, for a sequence of the full context
    machine: Machine
    device_index: int | None  # of the GPU that an engine would use; None: the CPU
    accelerators: tuple[Accelerator, ...]
    ledger: Ledger  # of the rule that the options name
    rules: tuple[Ledger, ...]  # of each rule, with all other options the same
    mechanisms: tuple[tuple[str, str | None], ...]  # what the system can do; why it cannot, or None

    def num_tokens(self, ledger: Ledger) -> int:
        """Return how many tokens a ledger's bytes hold while no window has passed any."""
        return max(0, ledger.kv_bytes) // max(1, self.needs.bytes_per_token)

    def num_sequences(self, ledger: Ledger) -> float:
        """Return how many sequences of the full context a ledger's bytes hold."""
        return max(0, ledger.kv_bytes) / max(1, self.sequence_bytes)


def diagnose(model: str | None, config: EngineConfig) -> Diagnosis:
    """Inspect a model and this machine. Raises: ConfigError, ModelNotLoadable."""
    from quire.devices import choose_device
    from quire.engine.kv_sizing import kv_needs, ledger_for, stored_spec
    from quire.memory.by_device import machine_for, memory_for
    from quire.models.footprint import outline

    name, own, spec = outline(model, dtype=config.dtype)
    device = choose_device(config.device)
    on_gpu, page_bytes = device.type == "cuda", memory_for(device, "on-demand").page_bytes
    needs = kv_needs(config, name, spec, own, page_bytes, on_gpu=on_gpu)
    machine = machine_for(device)
    rules = [replace(config, budget=rule, kv_cache_memory_bytes=None) for rule in BUDGETS]

    def on_device(device: DeviceMemory, page_bytes: int) -> tuple[Ledger, ...]:
        there = read_machine(device=device)
        needs = kv_needs(config, name, spec, own, page_bytes, on_gpu=True)
        return tuple(ledger_for(rule, needs, there) for rule in rules)

    return Diagnosis(
        name=name,
        needs=needs,
        sequence_bytes=stored_spec(config, spec).bytes_for(needs.context_tokens),
        machine=machine,
        device_index=device.index if on_gpu else None,
        accelerators=tuple(_accelerator(found, on_device) for found in cuda_devices()),
        ledger=ledger_for(config, needs, machine),
        rules=tuple(ledger_for(rule, needs, machine) for rule in rules),
        mechanisms=_mechanisms(HostMemory()),
    )


def _accelerator(
    found: DeviceMemory | str, rules_on: Callable[[DeviceMemory, int], tuple[Ledger, ...]]
) -> Accelerator:
    import torch

    from quire.memory.by_device import memory_for

    if isinstance(found, str):
        return Accelerator(memory=None, why_not=found)
    try:
        provider = memory_for(torch.device("cuda", found.index), "on-demand")
    except QuireError as error:
        return Accelerator(memory=found, why_not=str(error))
    return Accelerator(memory=found, why_not=None, rules=rules_on(found, provider.page_bytes))


def _mechanisms(host: HostMemory) -> tuple[tuple[str, str | None], ...]:
    populate = "this kernel has no MADV_POPULATE_WRITE, so pages are committed by writing to them"
    return (
        ("pages committed in one call", populate if host.portable else None),
        ("pages shared between sequences (virtual)", host.cannot_share),
        ("pages locked in memory (--residency lock)", _why_no_locks()),
    )


def _why_no_locks() -> str | None:
    try:
        return why_no_locks()
    except OSError as error:
        return str(error)
