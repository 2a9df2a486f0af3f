"""A line in the log now and then of how the engine is doing: while it does something, and after."""

import asyncio
import logging
import time
from typing import final

from quire.engine.async_llm import AsyncLLM
from quire.units import format_bytes

log = logging.getLogger(__name__)

INTERVAL_S = 10.0


async def log_stats(llm: AsyncLLM) -> None:
    """Until it is cancelled."""
    progress = Progress(llm)
    while True:
        await asyncio.sleep(INTERVAL_S)
        if (line := progress.line(time.monotonic())) is not None:
            log.info("%s", line)


@final
class Progress:
    """What has happened from one call of ``line`` to the next."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm.llm
        self._before, self._before_s = self._counted(), time.monotonic()
        self._was_quiet = True

    def line(self, now_s: float) -> str | None:
        """None where nothing has happened, but for the first time."""
        counted = self._counted()
        is_quiet, was_quiet = counted == self._before, self._was_quiet
        rates = [
            (now - then) / max(1e-9, now_s - self._before_s)
            for now, then in zip(counted, self._before, strict=True)
        ]
        self._before, self._before_s, self._was_quiet = counted, now_s, is_quiet
        return None if is_quiet and was_quiet else self._line(*rates)

    def _counted(self) -> tuple[int, int]:
        statistics = self._llm.statistics
        return statistics.num_prompt_tokens, statistics.num_generation_tokens

    def _line(self, prompt_rate: float, generation_rate: float) -> str:
        statistics, scheduler = self._llm.statistics, self._llm.engine.scheduler
        usage = self._llm.usage(wait=False)
        hits = statistics.prefix_hit_tokens / max(1, statistics.prefix_query_tokens)
        return (
            f"tokens/s: {prompt_rate:.1f} of prompts, {generation_rate:.1f} generated; "
            f"{scheduler.num_running} running, {scheduler.num_waiting} waiting; KV memory: "
            f"{format_bytes(usage.used_bytes)} used, {format_bytes(usage.cached_bytes)} cached, "
            f"{format_bytes(usage.committed_bytes)} committed, "
            f"{format_bytes(self._llm.elastic.ceiling_bytes)} the ceiling; prefix hits {hits:.1%}; "
            f"{statistics.num_preemptions} preemptions"
        )
