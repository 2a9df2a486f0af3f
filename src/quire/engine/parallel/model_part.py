"""A model of which each rank loads a part, as Transformers' own plan cuts it.

Raises a sentence for what is not cut, before any process is started.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from quire.config import EngineConfig
from quire.devices import choose_device
from quire.engine.parallel.leader import LeaderGroup
from quire.engine.parallel.messages import Assemble, Failed, LoadSaved, Look, Unload
from quire.engine.parallel.process_group import meeting
from quire.engine.parallel.worker_group import WorkerGroup
from quire.errors import ConfigError
from quire.kv import STRATEGIES, CacheConfig
from quire.memory import PROVIDERS
from quire.memory.machine import Machine
from quire.memory.residency import Residency
from quire.models.loader import LoadedModel, load, read_config
from quire.models.rank_spec import part_spec
from quire.spec import ModelSpec
from quire.spec.model_files import find_folder

log = logging.getLogger(__name__)


@final
class PartedModel:
    """The rest of a model, in other ranks. ``close`` ends them if they were started for it."""

    def __init__(self, crew: WorkerGroup, model: int, *, owns_crew: bool) -> None:
        self._crew, self._model, self._owns_crew = crew, model, owns_crew

    @property
    def num_ranks(self) -> int:
        return self._crew.num_ranks

    @property
    def crew(self) -> WorkerGroup:
        return self._crew

    def team(
        self,
        spec: ModelSpec,
        strategy: str,
        sizes: CacheConfig,
        config: EngineConfig,
        residency: Residency = "on-demand",
    ) -> LeaderGroup:
        """The others, ready for an engine. Raises: ConfigError, MemoryUnavailable, RankLost."""
        return LeaderGroup(
            self._crew,
            Assemble(
                engine=self._crew.new_name(),
                model=self._model,
                spec=spec,
                strategy=strategy,
                sizes=sizes,
                config=config,
                residency=residency,
            ),
        )

    def share_of(self, machine: Machine) -> Machine:
        """A rank's part of where rank 0 is; of CUDA devices the one with the least left.

        Raises: MemoryUnavailable where one of them does not say how much it has; RankLost.
        """
        if machine.device is None:
            return machine.share(self.num_ranks)
        _, answers = self._crew.all_of(Look(model=self._model), _nothing)
        devices = [machine.device]
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer.error
            if answer.value is not None:
                devices.append(answer.value)
        return replace(machine, device=min(devices, key=lambda device: device.free_bytes))

    def close(self) -> None:
        if self._owns_crew:
            self._crew.close()
        else:
            self._crew.try_tell(Unload(model=self._model))


def load_parts(
    name: str | Path | None,
    num_ranks: int,
    *,
    device: str = "auto",
    dtype: str = "auto",
    show_progress: bool = False,
    crew: WorkerGroup | None = None,
) -> LoadedModel:
    """Rank 0's part of a folder or a hub name, the others loaded beside it.

    ``device`` is as the engine's option: on CUDA each rank has the device of its number.

    ``crew``: ranks that are there already; without, they are started, and end with the model.

    Raises: ConfigError, UnsupportedModel, ModelNotLoadable, RankLost.
    """
    folder = find_folder(name)
    config, spec = read_config(str(folder or name), folder)
    part_spec(str(folder or name), config, spec, num_ranks)  # raises before anything is started
    started = None if crew else WorkerGroup(num_ranks, choose_device(device).type).start()
    ranks = started or crew
    assert ranks is not None
    model = ranks.new_name()
    try:
        message = LoadSaved(model=model, name="" if name is None else str(name), dtype=dtype)

        def load_own() -> LoadedModel:
            return load_part(
                name, dtype=dtype, rank=0, num_ranks=num_ranks, show_progress=show_progress
            )

        loaded = ranks.required(message, load_own)
    except BaseException:
        if started is not None:
            started.close()
        else:
            ranks.try_tell(Unload(model=model))  # where it is loaded all the same
        raise
    if loaded.spec.bytes_per_token == spec.computed_in(loaded.dtype).bytes_per_token:
        log.warning(
            "%s: every rank keeps all keys and values, since Transformers' plan does not divide "
            "them: KV memory is not less than in one process",
            loaded.name,
        )
    return replace(loaded, ranks=PartedModel(ranks, model, owns_crew=started is not None))


def load_part(
    name: str | Path | None, *, dtype: str, rank: int, num_ranks: int, show_progress: bool = False
) -> LoadedModel:
    """One rank's part; all ranks do this together."""
    with meeting(rank):
        loaded = load(
            name or None,
            dtype=dtype,
            copy_weights=False,
            show_progress=show_progress,
            num_ranks=num_ranks,
        )
    spec = part_spec(loaded.name, loaded.model.config, loaded.spec, num_ranks)
    return replace(loaded, spec=spec)


def refuse_options(config: EngineConfig, model: Any, provider: object = None) -> None:
    """Raises: ConfigError for what several ranks cannot have."""
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
            f"{option}: a model in memory cannot be cut any more: save it, and give its folder"
        )
    if provider is not None:
        raise ConfigError(
            f"{option}: provider= is of one process, and each rank makes its own: leave it out, or "
            f"give memory_provider a name"
        )
    for name, registry in (("cache", STRATEGIES), ("memory_provider", PROVIDERS)):
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


def _nothing() -> None:
    """Rank 0 has no part in it."""


__all__ = ["PartedModel", "load_part", "load_parts", "refuse_options"]
