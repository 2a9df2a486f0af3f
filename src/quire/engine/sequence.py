"""Requests and sequences: what a client asked for, and how far the engine has come with it.

Nothing here knows about memory; ``num_computed_tokens`` says how many tokens the cache holds.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from quire.blocks import NO_KEYS, PrefixKeys
from quire.errors import RequestError

FinishReason = Literal["stop", "length", "capacity"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. The names and defaults are vLLM's.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 switch those filters off. With a
    ``seed`` a request gives the same text whatever else is in the batch. ``stop`` strings end the
    text and are not part of it.

    Raises: RequestError naming the parameter, its value and its limit.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        infinity = float("inf")
        limits = {
            "max_tokens": (_is_int(self.max_tokens, 1), "a whole number of at least 1"),
            "temperature": (_is_number(self.temperature, 0, infinity), "a number of 0 or more"),
            "top_k": (_is_int(self.top_k, 0), "a whole number: 0 (off) or more"),
            "top_p": (_is_number(self.top_p, 0, 1) and self.top_p > 0, "above 0 and at most 1"),
            "min_p": (_is_number(self.min_p, 0, 1), "between 0 and 1"),
            "seed": (self.seed is None or _is_int(self.seed), "a whole number, or None"),
            "stop": (_are_strings(self.stop), "a string or several, none of them empty"),
        }
        for name, (holds, limit) in limits.items():
            if not holds:
                raise RequestError(f"{name}={getattr(self, name)!r} must be {limit}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)  # a list, or one string, as people write it


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asked for."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    keys: PrefixKeys = NO_KEYS  # with whom its prefix may be shared
    priority: int = 0  # what it leaves in the cache goes before that of smaller ones

    @property
    def max_tokens(self) -> int:
        """The longest it can become, prompt included. The last token's entry is never needed."""
        return len(self.prompt_token_ids) + self.params.max_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """The running state of one continuation of a request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)  # prompt and continuation
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found computed when it was admitted
    num_preemptions: int = 0
    needs_room_at_once: bool = False  # it was preempted with nobody else there to make room
    began_again_at: int = 0  # tokens that it had when that did not help and it went on in chunks
    finish_reason: FinishReason | None = None
    finish_detail: str = ""  # for people: why it ended early

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)

    @property
    def seq_id(self) -> int:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.request.prompt_token_ids) :]


def _is_int(value: Any, least: int | None = None) -> bool:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and (least is None or value >= least)


def _is_number(value: Any, least: float, most: float) -> bool:
    """Whether it is in [least, most]; infinity and NaN are not numbers here."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and least <= value <= most and value != float("inf")


def _are_strings(value: Any) -> bool:
    several = [value] if isinstance(value, str) else value
    return isinstance(several, list | tuple) and all(
        isinstance(text, str) and bool(text) for text in several
    )
