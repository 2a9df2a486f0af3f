"""``ServedEngine``: what the server asks of what generates, be it in this process or elsewhere.

``AsyncLLM`` is one. An engine that is elsewhere lacks what needs its own process: its
``administration`` and its ``llm`` are None then, and the paths that need them say so.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from quire.engine.llm import LLM
from quire.engine.outputs import TextDelta
from quire.engine.prompts import Prompt
from quire.engine.request_maker import ModelFacts
from quire.engine.scheduling.offload_policy import OffloadReport
from quire.engine.sequence import Request, Sequence
from quire.kv import NO_KEYS, PrefixKeys
from quire.sampling_params import Params

T = TypeVar("T")


class Administration(Protocol):
    """What an operator may ask of an engine in this process."""

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine was put to sleep."""
        ...

    def check_sleep(self, level: int) -> None:
        """Check a level of ``sleep``. Raises: RequestError."""
        ...

    async def sleep(self, level: int = 1) -> bool:
        """Give memory back until ``wake_up``. Return False while a request runs."""
        ...

    async def wake_up(self) -> None:
        """Run again after ``sleep``. Raises: what keeps the engine asleep."""
        ...

    def check_reset_external(self) -> None:
        """Check that all tiers can forget what they have of the model. Raises: RequestError."""
        ...

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_external: bool = False
    ) -> bool:
        """Drop the blocks that are kept for later prompts. Return False while a request runs.

        Raises: RequestError, TierError.
        """
        ...

    @property
    def tiers(self) -> OffloadReport | None:
        """What tiers hold and have done; None without tiers."""
        ...

    def trust_tiers(self, name: str | None = None) -> None:
        """Load from tiers again that gave bad records. Raises: RequestError."""
        ...

    async def store_hottest(self, seconds: float) -> int:
        """Store the hottest cached blocks for those who come after. Return how many."""
        ...

    async def inspect(self, function: Callable[[LLM, list[Sequence]], T]) -> T:
        """Call a function of the LLM and its unfinished sequences between two steps."""
        ...


class ServedEngine(Protocol):
    """Makes requests and continues them, for many readers at once."""

    @property
    def facts(self) -> ModelFacts:
        """What can be known of the model without its weights."""
        ...

    @property
    def failure(self) -> Exception | None:
        """Why no request can run at present; None while requests can."""
        ...

    async def request(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        priority: int = 0,
        keys: PrefixKeys = NO_KEYS,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> Request:
        """Tokenize and check a prompt. Raises: RequestError; RequestTooLong."""
        ...

    def generate(
        self, prompt: Prompt | Request, *, request_id: str | None = None
    ) -> AsyncGenerator[TextDelta, None]:
        """Continue a prompt, piece by piece. The last piece of each choice has a finish_reason.

        Leaving the loop, or cancelling the task that waits here, ends the request. Raises: errors
        of Quire, whose messages are for clients.
        """
        ...

    async def abort(self, request_ids: str | Iterable[str] | None) -> None:
        """End these requests, or all (None). Their readers get a last piece."""
        ...

    async def aclose(self) -> None:
        """End what still runs, and give everything back."""
        ...

    # -- of an engine in this process; None elsewhere ----------------------------------------------

    @property
    def administration(self) -> Administration | None:
        """What an operator may ask of it."""
        ...

    @property
    def llm(self) -> LLM | None:
        """The engine itself, whose figures are shown: do not step it."""
        ...
