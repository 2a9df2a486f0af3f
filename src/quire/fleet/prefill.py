"""Prefill apart: prompts that one replica computes for another, which goes on with their blocks.

A replica of the role ``kv_producer`` is a *prefill replica*. The door asks it for one token of a
prompt, and then the replica that was chosen, which loads the blocks. It is worth it where prompts
delay sequences that are being written, so ``pays`` counts those. Nothing depends on it: what is
not loaded is computed.
"""

import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, final

from quire.engine.sequence import Request
from quire.engine.transfer import read_params
from quire.errors import ConfigError
from quire.fleet.placement import LOAD_FRACTION, Load, Placed
from quire.sampling_params import SamplingParams
from quire.units import ceil_div

# What became of a prompt that prefill replicas could have computed. "here": that did not pay.
Prefilled: TypeAlias = Literal["apart", "here", "failed"]

_FIRST_DETOUR_S: Final = 0.02  # before one has been measured
_NEW_WEIGHT: Final = 0.1  # of one more in the mean

# -- whether, and how it is asked for --------------------------------------------------------------


@final
@dataclass(slots=True, eq=False)
class Detours:
    """What asking another replica first costs beside its computing, as measured, in seconds."""

    mean_s: float = field(default=_FIRST_DETOUR_S)

    def note(self, took_s: float, computing_s: float) -> None:
        """Note how long a prompt took there, and how long of that it should have computed."""
        self.mean_s += _NEW_WEIGHT * (max(0.0, took_s - computing_s) - self.mean_s)

    def pays(
        self,
        here: Placed,
        load: Load,
        there: Load,
        *,
        num_running: int,
        queued_tokens: int,
        block_size: int,
    ) -> bool:
        """Tell whether a prompt costs less if it is computed at a prefill replica first.

        ``here``: where it is to go on, with ``load``, and ``num_running`` sequences run; ``there``:
        the prefill replica's load, where ``queued_tokens`` of prompts wait. Seconds of this prompt
        and of sequences that it delays count alike: each that runs where a prompt is computed waits
        for it.
        """
        tokens = here.computed_tokens
        computing_s = tokens * load.prompt_token_s
        default_s = LOAD_FRACTION["STORAGE"] * block_size * load.prompt_token_s
        loading_s = ceil_div(tokens, block_size) * load.load_s_per_block.get("STORAGE", default_s)
        apart_s = (queued_tokens + tokens) * there.prompt_token_s + loading_s + self.mean_s
        return (1 + num_running) * computing_s > apart_s


def can_be_apart(request: Request) -> bool:
    """Tell whether another replica can compute a request's prompt for the one that goes on."""
    return (
        request.pooling is None
        and request.source is None
        and request.remote is None
        and not request.leaves_blocks
        and request.params.prompt_logprobs is None
    )


def prompt_alone(request: Request) -> Request:
    """Return what a prefill replica is asked for: the prompt, of which it leaves the blocks."""
    return replace(
        request,
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        beam=None,
        bad_words=(),
        grammar=None,
        leaves_blocks=True,
        resumption=None,
        session=None,  # it stays where its answers are
    )


def with_blocks(request: Request, left: Mapping[str, Any] | None) -> Request:
    """Return a request that loads what a prefill replica says that it has left."""
    return replace(request, remote=read_params(left)[1])


# -- where prefill replicas are found --------------------------------------------------------------

_SPARE: Final = 2  # places beside twice as many as there are: of replicas that end or take over
WAIT_S: Final = 5.0  # that a prompt waits for blocks which are on their way


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
