"""What all endpoints of an app share: the engine, its names, keys, texts, queue and metrics; sleep
and the end.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from quire.chat.conversation import Chat
from quire.chat.token_texts import TokenTexts
from quire.config import ServerConfig
from quire.server.admission_control import AdmissionControl, Bounds
from quire.server.api_keys import Keys, Origins
from quire.server.fair_shares import Bodies, TextThreads
from quire.server.logs import RequestWriter
from quire.server.media_files import MediaFiles
from quire.server.metrics.exposition import Metrics
from quire.server.metrics.family import MetricSource
from quire.server.request_params import sampling_defaults
from quire.server.response_store import Background, Store
from quire.server.served_engine import Administration, ServedEngine
from quire.server.tracing import Tracer
from quire.server.wire.body import MOST_VALUES
from quire.server.wire.error_responses import Refused, elsewhere
from quire.version import VERSION

log = logging.getLogger(__name__)
_BODIES = 16  # of the longest allowed, in memory at once
_POLL_S = 0.05


class Service:
    """The state of one app. It belongs to the event loop that serves it."""

    def __init__(
        self, engine: ServedEngine, config: ServerConfig, figures: Sequence[MetricSource] = ()
    ) -> None:
        self.engine, self.config, facts = engine, config, engine.facts
        self.names = config.served_model_name or (facts.name,)
        self.keys = Keys(config.api_key, config.admin_api_key)
        self.origins = Origins(
            config.allowed_origins,
            is_private=config.is_local and config.uds is None and not config.api_key,
        )
        self.metrics = Metrics(engine.llm, self.model_name, figures)
        self.tracer = (
            Tracer(config.otlp_traces_endpoint, version=VERSION)
            if config.otlp_traces_endpoint
            else None
        )
        self.request_log = RequestWriter(config.request_log) if config.request_log else None
        self.admission = AdmissionControl(
            Bounds(
                num_queued_reqs=config.max_num_queued_reqs,
                num_queued_tokens=config.max_num_queued_tokens,
                num_reqs_per_key=config.max_num_reqs_per_key,
            )
        )
        self.bodies = Bodies(_BODIES * config.max_request_bytes)
        # A prompt may be token ids, as many as the context has.
        self.most_values = max(MOST_VALUES, 2 * facts.max_model_len)
        self.created = int(time.time())
        self.sampling_defaults = sampling_defaults(
            config.generation_config, own=facts.sampling_defaults
        )
        self.texts = TokenTexts(facts.tokenizer, facts.max_model_len)
        self.chat = Chat(
            facts.tokenizer,
            self.texts,
            chat_template=config.chat_template or facts.vision.chat_template,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
            model_type=facts.model_type,
            placeholders=facts.vision.placeholders,
        )
        self.responses = Store(config.max_stored_response_bytes)
        self.background = Background(config.max_background_responses)
        self.text_threads = TextThreads()
        self.media = MediaFiles(
            config.allowed_media_domains,
            config.allowed_local_media_path,
            timeout_s=config.image_fetch_timeout,
            most_bytes=config.max_request_bytes,
        )
        self._changing_sleep = asyncio.Lock()
        self._num_aborting = 0  # sleepers that abort what runs

    @property
    def model_name(self) -> str:
        """Return the first name under which the model is served."""
        return self.names[0]

    @property
    def max_model_len(self) -> int:
        """Return the tokens of the longest sequence."""
        return self.engine.facts.max_model_len

    def refuse_without_engine(self) -> None:
        """Refuse while the engine has failed. Raises: Refused (503)."""
        if self.engine.failure is not None:
            raise Refused(503, "the engine has failed", code="engine_dead")

    @property
    def administration(self) -> Administration:
        """What an operator may ask of the engine. Raises: Refused (501) where it is elsewhere."""
        engine = self.engine.administration
        if engine is None:
            raise elsewhere("this is asked of an engine")
        return engine

    # -- asleep ------------------------------------------------------------------------------------

    async def idle(self) -> None:
        """Wait until no request is under way; end them now if a sleeper is to abort them."""
        while self.admission.num_under_way:
            if self._num_aborting:
                await self.engine.abort(None)
            await asyncio.sleep(_POLL_S)

    @asynccontextmanager
    async def falling_asleep(self, level: int, *, aborts: bool) -> AsyncGenerator[None, None]:
        """Let no request in inside the block; give memory back behind it, if nothing fails in it.

        A sleeper that ``aborts`` ends the requests of one that is still waiting for them.

        Raises: RequestError for a level that the model cannot have.
        """
        engine = self.administration
        engine.check_sleep(level)  # before a request is ended
        self._num_aborting += aborts
        try:
            async with self._changing_sleep:
                self.admission.sleeping = True
                try:
                    yield
                    while not await engine.sleep(level):  # the last requests are about to end
                        await asyncio.sleep(_POLL_S)
                finally:
                    self.admission.sleeping = engine.is_sleeping
        finally:
            self._num_aborting -= aborts

    async def wake_up(self) -> None:
        """Let requests in again. Raises: what keeps the engine asleep."""
        engine = self.administration
        async with self._changing_sleep:
            try:
                await engine.wake_up()
            finally:
                self.admission.sleeping = engine.is_sleeping

    # -- the end -----------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> bool:
        """Let no request in and wait up to ``timeout_s``; return whether none is left."""
        self.admission.draining = True
        until_s = time.monotonic() + timeout_s
        while self.admission.num_under_way and time.monotonic() < until_s:
            await asyncio.sleep(_POLL_S)
        return not self.admission.num_under_way

    def close(self) -> None:
        """End tasks, threads and processes. The engine's owner closes the engine."""
        self.background.close()
        self.text_threads.close()
        self.media.close()
        if self.tracer is not None:
            self.tracer.close()
        if self.request_log is not None:
            self.request_log.close()
