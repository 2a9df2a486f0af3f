"""What ``quire doctor`` finds: a model's needs, this machine, and every rule's ledger."""

from dataclasses import dataclass, replace

from quire.config import EngineConfig
from quire.memory import HostMemory
from quire.memory.budget import BUDGETS, Ledger, Needs
from quire.memory.host.locked import why_no_locks
from quire.memory.machine import DeviceMemory, Machine, cuda_memory, read_machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What doctor found."""

    name: str  # of the model
    needs: Needs
    sequence_bytes: int  # of KV, at the longest
    machine: Machine
    accelerator: DeviceMemory | None  # named, and not used yet
    ledger: Ledger  # of the options
    rules: tuple[Ledger, ...]  # each rule's, with the same options otherwise
    mechanisms: tuple[tuple[str, str | None], ...]  # what it is for, why not (None: it works)

    def num_tokens(self, ledger: Ledger) -> int:
        """Tokens that a ledger's bytes hold, while nothing is forgotten."""
        return max(0, ledger.kv_bytes) // max(1, self.needs.bytes_per_token)

    def num_sequences(self, ledger: Ledger) -> float:
        """Sequences at their longest."""
        return max(0, ledger.kv_bytes) / max(1, self.sequence_bytes)


def diagnose(model: str | None, config: EngineConfig) -> Diagnosis:
    """Look at the model and at this machine. Raises: ConfigError, ModelNotLoadable."""
    from quire.engine.needs import kv_needs, ledger_for, stored_spec
    from quire.models.footprint import outline

    name, own, spec = outline(model, dtype=config.dtype)
    host = HostMemory()
    needs = kv_needs(config, name, spec, own, host.page_bytes)
    machine = read_machine()
    rules = (replace(config, budget=rule, kv_cache_memory_bytes=None) for rule in BUDGETS)
    return Diagnosis(
        name=name,
        needs=needs,
        sequence_bytes=stored_spec(config, spec).bytes_for(needs.context_tokens),
        machine=machine,
        accelerator=cuda_memory(),
        ledger=ledger_for(config, needs, machine),
        rules=tuple(ledger_for(rule, needs, machine) for rule in rules),
        mechanisms=_mechanisms(host),
    )


def _mechanisms(host: HostMemory) -> tuple[tuple[str, str | None], ...]:
    populate = "this kernel has no MADV_POPULATE_WRITE: pages are committed by writing to them"
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
