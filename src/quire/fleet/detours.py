"""Prefill apart: which prompts one replica computes for another, which goes on with their blocks.

A replica of the role ``kv_producer`` is a *prefill replica*. The door asks it for one token of a
prompt, and then the replica that was chosen, which loads the blocks. It is worth it where prompts
delay sequences that are being written, so ``weigh`` counts those. Nothing depends on it: what is
not loaded is computed. A simulated fleet and a plan weigh by the same code.
"""

from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias, final

from quire.engine.sequence import Request
from quire.fleet.placement import LOAD_FRACTION, Load, Placed
from quire.sampling_params import SamplingParams
from quire.units import ceil_div

# What became of a prompt that prefill replicas could have computed. "here": that did not pay.
Prefilled: TypeAlias = Literal["apart", "here", "failed"]

WAIT_S: Final = 5.0  # that a prompt waits for blocks which are on their way
_FIRST_DETOUR_S: Final = 0.02  # before one has been measured
_NEW_WEIGHT: Final = 0.1  # of one more in the mean

# -- whether it pays -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trade:
    """What a prompt costs all who wait for it, in seconds: computed where it goes on, or apart."""

    here_s: float  # its own computing, for itself and for each sequence that runs there
    apart_s: float  # the queue and its computing there, the loading of its blocks, and the detour

    @property
    def pays(self) -> bool:
        """Return whether it costs less apart."""
        return self.apart_s < self.here_s


@final
@dataclass(slots=True, eq=False)
class Detours:
    """What asking another replica first costs beside its computing, as measured, in seconds."""

    mean_s: float = field(default=_FIRST_DETOUR_S)

    def note(self, took_s: float, computing_s: float) -> None:
        """Note how long a prompt took there, and how long of that it should have computed."""
        self.mean_s += _NEW_WEIGHT * (max(0.0, took_s - computing_s) - self.mean_s)

    def weigh(
        self,
        here: Placed,
        load: Load,
        there: Load,
        *,
        num_running: int,
        queued_tokens: int,
        block_size: int,
    ) -> Trade:
        """Weigh what a prompt costs here against what it costs at a prefill replica first.

        ``here``: where it is to go on, with ``load``, and ``num_running`` sequences run; ``there``:
        the prefill replica's load, where ``queued_tokens`` of prompts wait. Seconds of this prompt
        and of sequences that it delays count alike: each that runs where a prompt is computed waits
        for it. What is less than a block costs nothing here, for it is not loaded.
        """
        tokens = here.computed_tokens
        if tokens < block_size:
            return Trade(here_s=0.0, apart_s=self.mean_s)
        computing_s = tokens * load.prompt_token_s
        default_s = LOAD_FRACTION["STORAGE"] * block_size * load.prompt_token_s
        loading_s = ceil_div(tokens, block_size) * load.load_s_per_block.get("STORAGE", default_s)
        return Trade(
            here_s=(1 + num_running) * computing_s,
            apart_s=(queued_tokens + tokens) * there.prompt_token_s + loading_s + self.mean_s,
        )


# -- what is asked for -----------------------------------------------------------------------------


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
