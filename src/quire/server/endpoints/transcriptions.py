"""``POST /v1/audio/transcriptions`` and ``…/translations``: what is said in a recording.

The model hears it window by window, under one admission: an hour takes the place of one sequence.
One step over the first window finds the language.
"""

import math
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, final

from starlette.responses import PlainTextResponse

from quire.engine.outputs import TextDelta
from quire.engine.sequence import Request
from quire.sampling_params import SamplingParams
from quire.server.audio import AudioFile, AudioWindow
from quire.server.endpoints.answers import Json, as_events, as_json
from quire.server.endpoints.generation import Generation, engine_request, room_for, sampling
from quire.server.request_context import RequestContext
from quire.server.schemas.request_fields import Sampling
from quire.server.schemas.transcription_request import (
    Duration,
    Segment,
    TextDone,
    TranscriptDelta,
    Transcription,
    TranscriptionRequest,
    VerboseTranscription,
)
from quire.server.wire.error_responses import Refused
from quire.server.wire.streams import RESPONSES, EventStream, all_of

Task: TypeAlias = Literal["transcribe", "translate"]
Answer: TypeAlias = (
    Json[Transcription | VerboseTranscription]
    | EventStream[TranscriptDelta | TextDone]
    | PlainTextResponse
)


async def transcriptions(context: RequestContext, asked: TranscriptionRequest) -> Answer:
    """Return what is said in a recording, in the language in which it is said."""
    return await _answer(context, asked, "transcribe")


async def translations(context: RequestContext, asked: TranscriptionRequest) -> Answer:
    """Return what is said in a recording, in English."""
    return await _answer(context, asked, "translate")


async def _answer(context: RequestContext, asked: TranscriptionRequest, task: Task) -> Answer:
    context.service.engine.facts.hearing.check(task)
    listening = _Listening(context, asked, task)
    await listening.begin()
    if asked.stream:
        return as_events(context, listening.events(), RESPONSES)
    await all_of(context.http.receive, listening.events())
    if asked.response_format == "verbose_json":
        return as_json(context, listening.verbose())
    if asked.response_format in (None, "json"):
        answer = Transcription(text=listening.text, usage=listening.usage())
        return as_json(context, answer)
    plain = listening.text + "\n"
    if asked.response_format != "text":
        plain = _subtitles(listening.heard, as_vtt=asked.response_format == "vtt")
    return PlainTextResponse(plain, headers=context.headers)


@dataclass(slots=True, eq=False)
class _Heard:
    """What is said in one window, as far as it is known."""

    window: AudioWindow
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    sum_logprobs: float = 0.0

    def add(self, piece: TextDelta) -> None:
        """Add what is new. Raises: Refused for a text that was ended from outside."""
        if piece.finish_reason == "abort":
            raise Refused(503, "the text was ended early", code="engine_unavailable")
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.sum_logprobs += sum(each.logprob for each in piece.logprobs)
        if piece.finish_reason == "stop":
            self.token_ids.pop()  # the end token is no text


@final
class _Listening:
    """The transcription of one recording."""

    def __init__(self, context: RequestContext, asked: TranscriptionRequest, task: Task) -> None:
        self._context, self._asked, self._task = context, asked, task
        self._service = context.service
        self._hearing = self._service.engine.facts.hearing
        self._language = "" if self._hearing.language_ids else "en"  # by code; empty: not known
        self.heard: list[_Heard] = []
        self.text = ""

    async def begin(self) -> None:
        """Read the first window and join the queue. Raises: Refused; RequestError."""
        context, hearing = self._context, self._hearing
        if self._asked.language:
            self._language = hearing.language_of(self._asked.language)
        before = (self._asked.prompt or "").strip()
        self._previous = await context.in_text_thread(hearing.previous, before) if before else ()
        self._recording = await context.in_text_thread(self._opened)
        await self._read_on()
        request = await (self._request() if self._language else self._question())
        self._work = Generation(context, [request], self._task)

    async def events(self) -> AsyncGenerator[TranscriptDelta | TextDone, None]:
        """Yield what is said as events."""
        async with aclosing(self._pieces()) as pieces:
            async for text in pieces:
                if text:
                    yield TranscriptDelta(delta=text)
        yield TextDone(text=self.text, usage=self.usage())

    def usage(self) -> Duration:
        """Return the seconds of the recording so far."""
        return Duration(seconds=math.ceil(self._recording.seconds))

    def verbose(self) -> VerboseTranscription:
        """Return the transcription with its segments."""
        temperature = self._asked.temperature or 0
        return VerboseTranscription(
            task=self._task,
            language=self._hearing.name_of(self._language),
            duration=self._recording.seconds,
            text=self.text,
            segments=[_segment(*each, temperature) for each in enumerate(self.heard)],
            usage=self.usage(),
        )

    async def _pieces(self) -> AsyncGenerator[str, None]:
        """Yield what is said, as it is understood. Closing it ends the request."""
        if not self._language:
            await self._find_language()
            self._follow(await self._request())
        while True:
            heard = self.heard[-1]
            async with aclosing(self._work.deltas()) as deltas:
                async for _, piece in deltas:
                    heard.add(piece)
                    new = piece.text if self.text else piece.text.lstrip()
                    self.text += new
                    yield new
            if not await self._read_on():
                return
            self._previous = ()
            self._follow(await self._request())

    async def _find_language(self) -> None:
        found: list[int] = []
        async with aclosing(self._work.deltas()) as deltas:
            async for _, piece in deltas:
                found += piece.token_ids
        by_id = {own: code for code, own in self._hearing.language_ids.items()}
        if not found:
            raise Refused(503, "the step that finds the language was ended early")
        self._language = by_id[found[0]]

    def _opened(self) -> AudioFile:
        hearing = self._hearing
        return AudioFile(
            self._asked.file, rate=hearing.sampling_rate, window_samples=hearing.window_samples
        )

    async def _read_on(self) -> bool:
        """Read another window, the last in ``heard`` then; return whether there is one. Raises:
        Refused.
        """
        num_bytes = 4 * self._hearing.window_samples
        window = await self._context.in_text_thread(self._recording.next, num_bytes=num_bytes)
        if window is None:
            return False
        self._features = await self._context.in_text_thread(
            self._hearing.features, window.samples, num_bytes=num_bytes
        )
        self.heard.append(_Heard(window))
        return True

    def _follow(self, request: Request) -> None:
        self._work = Generation(self._context, [request], self._task, after=self._work)

    async def _request(self) -> Request:
        """Ask what is said in the last window that was read."""
        begins = (*self._previous, *self._hearing.begins(self._task, self._language))
        asked = Sampling(temperature=self._asked.temperature or 0, seed=self._asked.seed)
        params = sampling(
            self._context,
            asked,
            max_tokens=room_for(self._context, len(begins), None),
            logprobs=0,
        )
        return await self._ask(begins, params)

    async def _question(self) -> Request:
        """Ask in which language it is said. The model can only answer with one of them."""
        languages = tuple(self._hearing.language_ids.values())
        params = SamplingParams(max_tokens=1, temperature=0, allowed_token_ids=languages)
        request = await self._ask((self._hearing.start,), params)
        return replace(request, suppressed=(), suppressed_first=())

    async def _ask(self, begins: tuple[int, ...], params: SamplingParams) -> Request:
        prompt = {"source": self._features, "prompt_token_ids": begins}
        return await engine_request(self._context, prompt, params, self._asked)


def _segment(number: int, heard: _Heard, temperature: float) -> Segment:
    data, window = heard.text.encode(), heard.window
    return Segment(
        id=number,
        seek=round(100 * window.start_s),
        start=window.start_s,
        end=window.end_s,
        text=heard.text,
        tokens=heard.token_ids,
        temperature=temperature,
        avg_logprob=heard.sum_logprobs / (len(heard.token_ids) + 1),
        compression_ratio=len(data) / len(zlib.compress(data)),
    )


def _subtitles(several: Sequence[_Heard], *, as_vtt: bool) -> str:
    """Return one subtitle for each window, in SubRip's or WebVTT's form."""
    written = ["WEBVTT\n"] if as_vtt else []
    for number, heard in enumerate(several, 1):
        mark = "." if as_vtt else ","
        times = " --> ".join(_clock(s, mark) for s in (heard.window.start_s, heard.window.end_s))
        text = heard.text.strip().replace("-->", "->")
        written.append(f"{times}\n{text}\n" if as_vtt else f"{number}\n{times}\n{text}\n")
    return "\n".join(written)


def _clock(at_s: float, mark: str) -> str:
    minutes, thousandths = divmod(round(1000 * at_s), 60_000)
    seconds, thousandths = divmod(thousandths, 1000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}{mark}{thousandths:03}"
