"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``, as OpenAI has them."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from quire.server.schemas.request_fields import Text, Upload
from quire.server.wire.error_responses import invalid


class TranscriptionRequest(Upload, kw_only=True):
    """A recording, and what is known of it."""

    language: Text | None = None  # what is spoken, a code or a name; the model finds it by default
    prompt: Annotated[str, Meta(max_length=2**16)] | None = None  # what was said before
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None  # json
    temperature: Annotated[float, Meta(ge=0, le=1e6)] | None = None  # 0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stream: bool | None = None
    granularities: Annotated[list[Text], Meta(max_length=64)] | None = field(
        default=None, name="timestamp_granularities[]"
    )

    def validate(self, names: Sequence[str]) -> None:
        super().validate(names)
        kind = self.response_format or "json"
        if self.stream and kind not in ("json", "text"):
            raise invalid("stream", f"stream gives json: leave it out, or response_format={kind}")
        for each in self.granularities or ():
            if each != "segment" or kind != "verbose_json":
                raise invalid(
                    "timestamp_granularities[]",
                    f"timestamp_granularities[]={each[:40]!r}: with response_format=verbose_json "
                    "there are the times of segments, and no other",
                )


class Duration(msgspec.Struct, kw_only=True):
    type: Literal["duration"] = "duration"
    seconds: int  # rounded up


class Transcription(msgspec.Struct, kw_only=True):
    text: str
    usage: Duration


class Segment(msgspec.Struct, kw_only=True):
    """What is said in one window."""

    id: int
    seek: int  # hundredths of a second
    start: float  # seconds
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float  # high where the text repeats itself
    no_speech_prob: float | None = None  # never computed


class VerboseTranscription(msgspec.Struct, kw_only=True):
    task: str
    language: str
    duration: float
    text: str
    segments: list[Segment]
    usage: Duration


class TranscriptDelta(msgspec.Struct, kw_only=True):
    type: Literal["transcript.text.delta"] = "transcript.text.delta"
    delta: str


class TextDone(msgspec.Struct, kw_only=True):
    type: Literal["transcript.text.done"] = "transcript.text.done"
    text: str
    usage: Duration
