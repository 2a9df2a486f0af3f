"""Where blocks of prompts that were computed apart are found: places of prefill replicas."""

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from quire.engine.sequence import Request
from quire.engine.transfer import read_params
from quire.errors import ConfigError
from quire.fleet.detours import WAIT_S

_SPARE: Final = 2  # places beside twice as many as there are: of replicas that end or take over


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPlaces:
    """Unix sockets in a folder of this machine, at which prefill replicas give blocks away.

    Only processes of the same user are let in there.
    """

    folder: str
    num_places: int

    @classmethod
    def made(cls, folder: str, num_replicas: int) -> "PrefillPlaces":
        """Return places for so many prefill replicas, and for those that take their places."""
        return cls(folder=folder, num_places=2 * num_replicas + _SPARE)

    def take(self) -> tuple[dict[str, Any], int]:
        """Take a free place for a prefill replica of this process.

        Returns: its ``kv_transfer_config``, and a descriptor that holds the place as long as it is
        open. Raises: ConfigError where none is free.
        """
        for number in range(self.num_places):
            held = os.open(self._path(number).with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(held)
            else:
                return self._config("kv_producer", listen=self._address(number)), held
        raise ConfigError(f"all {self.num_places} places for prefill replicas are taken")

    def of_decoder(self) -> dict[str, Any]:
        """Return the ``kv_transfer_config`` of a replica that goes on with others' prompts."""
        peers = [self._address(number) for number in range(self.num_places)]
        return self._config("kv_consumer", peers=peers, wait_s=WAIT_S)

    def _config(self, role: str, **extra: Any) -> dict[str, Any]:
        return {
            "kv_connector": "QuireConnector",
            "kv_role": role,
            "kv_connector_extra_config": extra,
        }

    def _address(self, number: int) -> str:
        return f"unix:{self._path(number)}"

    def _path(self, number: int) -> Path:
        return Path(self.folder) / str(number)


def with_blocks(request: Request, left: Mapping[str, Any] | None) -> Request:
    """Return a request that loads what a prefill replica says that it has left."""
    return replace(request, remote=read_params(left)[1])
