"""Define the options of a fleet: how many replicas, what each has, and which gets a request."""

from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from quire.config.environment import read
from quire.config.option import ADVANCED, in_range, one_of, option, seconds
from quire.errors import ConfigError

_PANEL = "Fleet"
PLACEMENT_NAMES = ("exact", "least-loaded", "dynamo")
_MOST_REPLICAS = 1024
_MOST_CPUS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Options of a fleet. Raises: ConfigError with the option, its value and its limit."""

    replicas: int = option(
        2,
        "Number of replicas: engines with the whole model, each in its own process.",
        panel=_PANEL,
    )
    prefill_replicas: int = option(
        0,
        "Further replicas that compute prompts for the others, where that costs less than the "
        "sequences it would delay there. On this machine only.",
        panel=_PANEL,
    )
    min_replicas: int | None = option(
        None,
        "Fewest replicas that the fleet shrinks to while there is little to do. Default: "
        "--replicas, so that it does not shrink.",
        panel=_PANEL,
    )
    max_replicas: int | None = option(
        None,
        "Most replicas that the fleet grows to while prompts wait. Default: --replicas.",
        panel=_PANEL,
    )
    cpus_per_replica: float | None = option(
        None,
        "CPU cores of a replica, for which Ray finds a place; its threads are as many. Default: "
        "this machine's cores divided by the replicas; on a cluster (RAY_ADDRESS) 1.",
        panel=_PANEL,
    )
    gpus_per_replica: float = option(
        0.0, "GPUs of a replica, which no other replica then uses.", panel=_PANEL
    )
    placement: Literal["exact", "least-loaded", "dynamo"] = option(
        "exact",
        "Replica that gets a request: exact (the one that answers first, by what each one's prefix "
        "cache holds and what waits there), least-loaded (the one with the fewest requests), or "
        "dynamo (as Dynamo's SelectionService says; needs ai-dynamo).",
        panel=_PANEL,
    )
    name_key: str | None = option(
        None,
        "File with a secret of 16 to 4,096 bytes, by which replicas name blocks of API keys and of "
        "salts to the door. Default: one is drawn at each start. Needed where doors are more than "
        "one, or a Serve file is deployed again.",
        panel=ADVANCED,
    )
    downscale_delay: float = option(
        600.0,
        "Seconds of little work before a replica, and with it its cached prefixes, is given up.",
        panel=ADVANCED,
    )
    health_check_timeout: float = option(
        10.0,
        "Seconds in which a replica must answer Ray's question after its health; after three "
        "misses another one takes its place.",
        panel=ADVANCED,
    )

    def __post_init__(self) -> None:
        in_range("replicas", self.replicas, 1, _MOST_REPLICAS)
        in_range("prefill_replicas", self.prefill_replicas, 0, _MOST_REPLICAS)
        for name in ("min_replicas", "max_replicas"):
            if getattr(self, name) is not None:
                in_range(name, getattr(self, name), 1, _MOST_REPLICAS)
        if not self.fewest <= self.replicas <= self.most:
            raise ConfigError(
                f"replicas={self.replicas} must be from min_replicas={self.fewest} to "
                f"max_replicas={self.most}"
            )
        if self.cpus_per_replica is not None:
            _amount("cpus_per_replica", self.cpus_per_replica)
        _amount("gpus_per_replica", self.gpus_per_replica)
        one_of("placement", self.placement, PLACEMENT_NAMES)
        if not isinstance(self.name_key, str | None):
            raise ConfigError(f"name_key={self.name_key!r} must be the path of a file")
        seconds("downscale_delay", self.downscale_delay, may_be_zero=True)
        seconds("health_check_timeout", self.health_check_timeout, may_be_zero=False)

    @classmethod
    def from_options(cls, **options: Any) -> "FleetConfig":
        """Make a config from keyword arguments and the environment (``QUIRE_REPLICAS=4``).

        Raises: ConfigError, for an unknown argument with the nearest known name.
        """
        return read(cls, options, lambda _: {})

    @property
    def fewest(self) -> int:
        """Return the number of replicas that the fleet never goes below."""
        return self.replicas if self.min_replicas is None else self.min_replicas

    @property
    def most(self) -> int:
        """Return the number of replicas that the fleet never exceeds."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def scales(self) -> bool:
        """Return whether the number of replicas follows the load."""
        return self.fewest < self.most


def _amount(name: str, value: float) -> None:
    """Check an amount of a resource, which may be a fraction. Raises: ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise ConfigError(f"{name}={value!r} must be a number")
    if not 0 <= value <= _MOST_CPUS:
        raise ConfigError(f"{name}={value:g} must be from 0 to {_MOST_CPUS:,}")
    if value > 1 and value != int(value):
        raise ConfigError(f"{name}={value:g} must be a whole number, or at most 1: so Ray has it")
