"""A model of which each rank loads a part, as Transformers' own plan cuts it.

What cannot be cut is refused before a process is started.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from quire.attention import BACKENDS
from quire.config import EngineConfig
from quire.devices import choose_device
from quire.engine.parallel.leader import LeaderGroup
from quire.engine.parallel.messages import Call, Failed
from quire.engine.parallel.process_group import meeting
from quire.engine.parallel.worker_group import WorkerGroup, nothing
from quire.errors import ConfigError
from quire.kv import EVICTION_POLICIES, STRATEGIES, CacheConfig
from quire.memory import PROVIDERS
from quire.memory.machine import Machine
from quire.memory.residency import Residency
from quire.models.loader import LoadedModel, load, read_config
from quire.models.rank_spec import part_spec
from quire.models.stored_checkpoint import stored_config
from quire.spec import ModelSpec
from quire.spec.model_files import find_folder

log = logging.getLogger(__name__)


@final
class PartedModel:
    """The rest of a model, in other ranks. ``close`` ends them if they were started for it."""

    def __init__(self, workers: WorkerGroup, model: int, *, owns_workers: bool) -> None:
        self.workers, self.num_ranks = workers, workers.num_ranks
        self.model, self._owns_workers = model, owns_workers

    def team(
        self,
        spec: ModelSpec,
        strategy: str,
        sizes: CacheConfig,
        config: EngineConfig,
        residency: Residency = "on-demand",
    ) -> LeaderGroup:
        """Assemble an engine in each rank. Raises: ConfigError, MemoryUnavailable, RankLost."""
        return LeaderGroup(self.workers, self.model, spec, strategy, sizes, config, residency)

    def share_of(self, machine: Machine) -> Machine:
        """Return a rank's share of a machine, with the CUDA device that has the least memory left.

        Raises: MemoryUnavailable where a device cannot be read; RankLost.
        """
        if machine.device is None:
            return machine.share(self.num_ranks)
        _, answers = self.workers.all_of(Call("read_device", (self.model,)), nothing)
        devices = [machine.device]
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer.error
            if answer.value is not None:
                devices.append(answer.value)
        return replace(machine, device=min(devices, key=lambda device: device.free_bytes))

    def close(self) -> None:
        """End the ranks that were started for the model; others only unload it."""
        if self._owns_workers:
            self.workers.close()
        else:
            self.workers.try_tell(Call("unload", (self.model,)))


def load_parts(
    name: str | Path | None,
    num_ranks: int,
    *,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: str | None = None,
    show_progress: bool = False,
    workers: WorkerGroup | None = None,
) -> LoadedModel:
    """Load rank 0's part of a folder or a hub name, beside the other ranks'.

    ``device`` is the engine's option: on CUDA each rank has the device of its number.
    ``tokenizer`` names the folder or the repository of one that is not the model's own; only rank 0
    reads and writes text. ``workers`` are started, and end with the model, if none are given.

    Raises: ConfigError, UnsupportedModel, ModelNotLoadable, RankLost.
    """
    folder = find_folder(name)
    config, spec = read_config(str(folder or name), folder)
    part_spec(str(folder or name), config, spec, num_ranks)  # raises before anything is started
    place = choose_device(device).type
    if place == "cpu" and stored_config(config) is not None:
        method = config.quantization_config["quant_method"]
        raise ConfigError(
            f"tensor_parallel_size={num_ranks}: the weights of {folder or name} are codes "
            f"({method}), and ranks divide none: leave the option out"
        )
    ranks = workers or WorkerGroup(num_ranks, place).start()
    parted = PartedModel(ranks, ranks.new_name(), owns_workers=workers is None)

    def load_own() -> LoadedModel:
        return load_part(
            name,
            dtype=dtype,
            rank=0,
            num_ranks=num_ranks,
            tokenizer=tokenizer,
            show_progress=show_progress,
        )

    try:
        call = Call("load", (parted.model, "" if name is None else str(name), dtype))
        loaded = ranks.required(call, load_own)
    except BaseException:
        parted.close()  # a rank may have loaded it all the same
        raise
    if loaded.spec.bytes_per_token == spec.computed_in(loaded.dtype).bytes_per_token:
        log.warning(
            "%s: every rank keeps all keys and values, since Transformers' plan does not divide "
            "them: KV memory is not less than in one process",
            loaded.name,
        )
    return replace(loaded, ranks=parted)


def load_part(
    name: str | Path | None,
    *,
    dtype: str,
    rank: int,
    num_ranks: int,
    tokenizer: str | None = None,
    show_progress: bool = False,
) -> LoadedModel:
    """Load one rank's part. All ranks do so together."""
    with meeting(rank):
        loaded = load(
            name or None,
            dtype=dtype,
            tokenizer=tokenizer,
            copy_weights=False,
            show_progress=show_progress,
            num_ranks=num_ranks,
        )
    spec = part_spec(loaded.name, loaded.model.config, loaded.spec, num_ranks)
    return replace(loaded, spec=spec)


def refuse_options(config: EngineConfig, model: Any, provider: object = None) -> None:
    """Refuse options that several ranks cannot have. Raises: ConfigError."""
    option = f"tensor_parallel_size={config.tensor_parallel_size}"
    if isinstance(model, LoadedModel):
        there = 1 if model.ranks is None else model.ranks.num_ranks
        if there != config.tensor_parallel_size:
            raise ConfigError(
                f"{option}: {model.name} was loaded in {there} "
                f"{'part' if there == 1 else 'parts'}: give its folder or name instead"
            )
    if config.tensor_parallel_size == 1:
        return
    if model is not None and not isinstance(model, LoadedModel | str | Path):
        raise ConfigError(
            f"{option}: a model in memory cannot be divided among ranks: save it, and give "
            f"its folder"
        )
    if provider is not None:
        raise ConfigError(
            f"{option}: provider= is of one process, and each rank makes its own: leave it out, or "
            f"give memory_provider a name"
        )
    for name, registry in (
        ("cache", STRATEGIES),
        ("memory_provider", PROVIDERS),
        ("attention_backend", BACKENDS),
        ("prefix_caching_policy", EVICTION_POLICIES),
    ):
        if registry.is_local(getattr(config, name)):
            raise ConfigError(
                f"{option}: {name}={getattr(config, name)} was registered in this process alone, "
                f"and ranks are processes of their own: give it an entry point in the group "
                f"{registry.group!r}"
            )
    if config.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"{option}: device={config.device} is one device, and each rank takes the one of its "
            f"number: say cuda"
        )
    if config.quantization is not None:
        raise ConfigError(
            f"{option}: quantization={config.quantization} quantizes whole layers, and a rank has "
            f"parts of them: leave one of the two out"
        )
    speculative = config.speculative_config
    if speculative is not None and speculative.model is not None:
        raise ConfigError(
            f"{option}: speculative_config: a draft model would lie in rank 0 alone, whose memory "
            f'would be another than the others\': use {{"method": "ngram", …}}'
        )
