"""``FleetPlan``: what a fleet is made of, as Ray Serve's config file says it; and
``wanted_replicas``: how many replicas the work wants, by what each reports of itself.

It needs no Ray: ``quire fleet --print-config`` writes the file on any machine. ``ray_serve`` makes
deployments of it.
"""

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from math import ceil
from typing import Any, Final

from quire.config import EngineConfig, FleetConfig, ServerConfig
from quire.engine.event_format import KEY_BYTES
from quire.engine.event_publisher import read_name_key
from quire.errors import ConfigError

APP: Final = "quire"  # the application's name
PREFILL_APP: Final = "quire-prefill"  # that of prefill replicas
REPLICA: Final = "Replica"  # the deployments' names
PREFILL: Final = "Prefill"
DOOR: Final = "Door"
BUILDER: Final = "quire.fleet.ray_serve:build"
STORE_S: Final = 10.0  # that a replica has to store its hottest blocks once its last stream is over
_MARGIN_S = 10.0  # of Serve's patience over ours
KEYS: Final = ("api_key", "admin_api_key")
_OWN_EVENTS = "the fleet publishes events of its own: each replica has a port for its door alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """A model, and the options of its engines, of the server in front and of the fleet.

    ``engine`` and ``server`` are options as a command line or a file has them, which can be written
    as JSON. Raises: ConfigError.
    """

    model: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold keys
    fleet: FleetConfig = field(default_factory=FleetConfig)

    def __post_init__(self) -> None:
        own = self.engine_config()
        if own.kv_events_config is not None:
            raise ConfigError(f"kv_events_config: {_OWN_EVENTS}")
        if self.fleet.prefill_replicas and own.kv_transfer_config is not None:
            raise ConfigError(
                f"kv_transfer_config: with prefill_replicas={self.fleet.prefill_replicas} the "
                "fleet says by itself which replica hands blocks to which"
            )
        if 0 < self.fleet.gpus_per_replica < own.tensor_parallel_size:
            raise ConfigError(
                f"gpus_per_replica={self.fleet.gpus_per_replica:g} is less than "
                f"tensor_parallel_size={own.tensor_parallel_size}: each rank needs a GPU of its own"
            )

    @classmethod
    def of(
        cls,
        model: str | None,
        engine: EngineConfig,
        server: ServerConfig,
        fleet: FleetConfig,
    ) -> "FleetPlan":
        """Make a plan of configs: what of their options is not the default."""
        return cls(model=model, engine=_said(engine), server=_said(server), fleet=fleet)

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> "FleetPlan":
        """Make a plan of the ``args`` in a Serve config file. Raises: ConfigError."""
        known = ("model", "engine", "server", "fleet")
        for name in args:
            if name not in known:
                raise ConfigError(f"args: {name!r} is unknown; known: {', '.join(known)}")
        for name in known[1:]:
            if not isinstance(args.get(name, {}), Mapping):
                raise ConfigError(f"args: {name} must be a mapping of options")
        model = args.get("model")
        if not isinstance(model, str | None):
            raise ConfigError(f"args: model={model!r} must be a text")
        return cls(
            model=model,
            engine=args.get("engine", {}),
            server=args.get("server", {}),
            fleet=FleetConfig.from_options(**args.get("fleet", {})),
        )

    def engine_config(self) -> EngineConfig:
        """Return the options of each engine. Raises: ConfigError."""
        return EngineConfig.from_options(**self.engine)

    def server_config(self) -> ServerConfig:
        """Return the options of the server in front. Raises: ConfigError."""
        return ServerConfig.from_options(**self.server)

    def name_key(self) -> bytes:
        """Return the key by which replicas name blocks of tenants and salts to their door.

        It is the file's, or drawn at each call. Raises: ConfigError.
        """
        path = self.fleet.name_key
        return secrets.token_bytes(KEY_BYTES) if path is None else read_name_key(path, "name_key")

    def require_no_places(self, where: str) -> None:
        """Refuse prefill replicas on a cluster. Raises: ConfigError."""
        if self.fleet.prefill_replicas:
            raise ConfigError(
                f"prefill_replicas={self.fleet.prefill_replicas}: blocks go over Unix sockets of "
                f"one machine, and {where} means several: leave it out"
            )

    @property
    def graceful_shutdown_s(self) -> float:
        """Return how long Serve lets a replica that is to go live on, at most.

        Streams end within ``shutdown_timeout``, and blocks are stored after them: Serve cuts none.
        """
        return self.server_config().shutdown_timeout + STORE_S + _MARGIN_S

    def serve_config(self) -> dict[str, Any]:
        """Return Serve's config file, for ``serve deploy`` and KubeRay.

        Raises: ConfigError for what a file cannot say.
        """
        self.require_no_places("a Serve file")
        server = dict(self.server)
        for name in KEYS:
            if any(not str(key).startswith("@") for key in server.get(name, ())):
                raise ConfigError(
                    f"{name}: a key would stand in the file for all to read: name a file that has "
                    f"it where the fleet runs (--{name.replace('_', '-')} @FILE), or set "
                    f"QUIRE_{name.upper()} there"
                )
        if "uds" in server:
            raise ConfigError(
                f"uds={server['uds']!r}: on a cluster Ray Serve's proxies listen, and at ports only"
            )
        http: dict[str, Any] = {
            "host": server.pop("host", "0.0.0.0"),
            "port": server.pop("port", ServerConfig().port),
        }
        for name in ("ssl_certfile", "ssl_keyfile"):
            if name in server:
                http[name] = server.pop(name)
        args = {
            "model": self.model,
            "fleet": _said(self.fleet),
            "engine": dict(self.engine),
            "server": server,
        }
        application = {
            "name": APP,
            "route_prefix": "/",
            "import_path": BUILDER,
            "args": {name: value for name, value in args.items() if value},
        }
        return {
            "proxy_location": "EveryNode",
            "http_options": http,
            "applications": [application],
        }


def _said(config: Any) -> dict[str, Any]:
    """Return the options of a config that are not the default, as JSON has them."""
    said = {}
    for option in fields(config):
        value = getattr(config, option.name)
        if option.default is not MISSING and value == option.default:
            continue
        if is_dataclass(value) and not isinstance(value, type):
            value = json.dumps(asdict(value))
        said[option.name] = list(value) if isinstance(value, tuple) else value
    return said


# -- how many replicas -----------------------------------------------------------------------------

BUSY: Final = "busy"  # sequences that run or wait, as a fraction of max_num_seqs
QUEUED_S: Final = "queued_s"  # seconds to compute the prompts that wait
BUSY_GOAL = 0.8
QUEUED_GOAL_S = 1.0


def wanted_replicas(reports: Mapping[str, Iterable[float]]) -> int:
    """Return how many replicas would be busy as they should be.

    ``reports`` has a number of each replica under ``BUSY`` and ``QUEUED_S``. A replica that has not
    reported has nothing to do. With more sequences than places they wait although no prompt is
    long; with long prompts a few sequences are a long queue: the larger of both numbers counts.
    """
    busy, queued_s = sum(reports.get(BUSY, ())), sum(reports.get(QUEUED_S, ()))
    return max(1, ceil(busy / BUSY_GOAL - 1e-9), ceil(queued_s / QUEUED_GOAL_S - 1e-9))
