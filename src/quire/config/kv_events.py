"""Define the options under which an engine announces its cached blocks, with vLLM's names.

Where vLLM listens on every interface by default, Quire listens on loopback: the announcements have
the token ids of every prompt, and a socket of ZeroMQ asks for no key.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from quire.config.keys import is_loopback
from quire.config.option import in_range, object_of, one_of, switch
from quire.errors import ConfigError

_OPTION = "kv_events_config"
_TCP = re.compile(r"tcp://(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[\w.*-]+)):(?P<port>[0-9]{1,5})")
_IPC = re.compile(r"ipc://(?P<path>\S+)")
_SOCKET_PATH_BYTES = 107  # longest path of a Unix socket
_ANY_ADDRESS = ("*", "0.0.0.0", "::")
_MAX_PORT = 65_535
_MAX_BATCHES = 2**24
_MAX_TOPIC_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Where and how cached blocks are announced. Names and meanings are those of vLLM 0.33.

    Raises: ConfigError with the field, its value and its limit.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None  # zmq or null; None: zmq if events are enabled
    endpoint: str = "tcp://127.0.0.1:5557"  # of the stream
    replay_endpoint: str | None = None  # where missed batches can be asked for; None: nowhere
    buffer_steps: int = 10_000  # batches that are kept for that
    hwm: int = 100_000  # batches that wait for one subscriber before it misses some
    max_queue_size: int = 100_000  # batches that wait to be sent before the oldest is dropped
    topic: str = ""  # the first frame of each message
    # Quire's own: a file with a secret, or the key itself. Engines that have the same one name
    # blocks of tenants and of salts alike. None: each process draws a secret.
    name_key: str | bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        switch(f"{_OPTION}: enable_kv_cache_events", self.enable_kv_cache_events)
        if self.publisher is None:
            chosen = "zmq" if self.enable_kv_cache_events else "null"
            object.__setattr__(self, "publisher", chosen)
        one_of(f"{_OPTION}: publisher", str(self.publisher), ("zmq", "null"))
        in_range(f"{_OPTION}: buffer_steps", self.buffer_steps, 0, _MAX_BATCHES)
        for name in ("hwm", "max_queue_size"):
            in_range(f"{_OPTION}: {name}", getattr(self, name), 1, _MAX_BATCHES)
        topic = self.topic.encode("utf-8", "replace") if isinstance(self.topic, str) else b""
        if topic.decode() != self.topic or len(topic) > _MAX_TOPIC_BYTES:  # half a surrogate pair
            raise ConfigError(
                f"{_OPTION}: topic={self.topic!r} must be a text of up to {_MAX_TOPIC_BYTES} bytes"
            )
        if not isinstance(self.name_key, str | bytes | None):
            raise ConfigError(f"{_OPTION}: name_key={self.name_key!r} must be the path of a file")
        host_of("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            host_of("replay_endpoint", self.replay_endpoint)
            takes_free_port = self.endpoint.endswith(":0")
            if self.replay_endpoint == self.endpoint and not takes_free_port:
                raise ConfigError(
                    f"{_OPTION}: replay_endpoint={self.replay_endpoint!r} is the endpoint of the "
                    "stream: give it a port or a path of its own"
                )

    @classmethod
    def parse(cls, given: Any) -> "KVEventsConfig | None":
        """Parse a JSON object, as text or as a mapping. Raises: ConfigError."""
        return object_of(_OPTION, cls, given)

    @property
    def publishes(self) -> bool:
        """Return whether events leave the engine."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    @property
    def binds(self) -> bool:
        """Return whether the stream's endpoint is an address of this machine that is listened at.

        Otherwise a subscriber listens there, and the engine connects to it.
        """
        host = host_of("endpoint", self.endpoint)
        return host is None or host in _ANY_ADDRESS or is_loopback(host)

    @property
    def open_endpoints(self) -> tuple[str, ...]:
        """Return the endpoints that lead to other machines."""
        hosts = {
            endpoint: host_of("endpoint", endpoint)
            for endpoint in (self.endpoint, self.replay_endpoint)
            if endpoint is not None
        }
        return tuple(
            each for each, host in hosts.items() if host is not None and not is_loopback(host)
        )


def host_of(name: str, endpoint: Any) -> str | None:
    """Return the host of an endpoint of ZeroMQ; None for a socket in the file system.

    ``name``: the field, for the message. Raises: ConfigError for what is no such endpoint.
    """
    text = endpoint if isinstance(endpoint, str) else ""
    if (tcp := _TCP.fullmatch(text)) and int(tcp["port"]) <= _MAX_PORT:
        return tcp["v6"] or tcp["name"]
    if (ipc := _IPC.fullmatch(text)) and len(ipc["path"].encode()) <= _SOCKET_PATH_BYTES:
        return None
    raise ConfigError(
        f"{_OPTION}: {name}={endpoint!r} must be tcp://HOST:PORT with a port up to {_MAX_PORT:,} "
        f"(* is every address of this machine), or ipc://PATH of up to {_SOCKET_PATH_BYTES} bytes"
    )
