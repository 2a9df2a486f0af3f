"""A sound file, read window by window: one channel, at the rate that the model hears.

The file stays compressed: an hour is a few megabytes, and a few hundred as samples. libsndfile
reads it, and soxr changes its rate, a piece at a time.
"""

import io
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from quire.server.wire.error_responses import Refused
from quire.server.wire.form import not_installed
from quire.units import format_count

MOST_SECONDS = 4 * 3600
_MOST_CHANNELS = 8
_LEAST_RATE, _MOST_RATE = 4_000, 192_000  # samples a second
_UNKNOWN = 2**62  # frames
_LOUDEST = 1e4  # 1 is the loudest that integer samples can be
_PIECE = 2**18  # samples of all channels, read at once
_SEARCHED = 15  # a cut lies in the last fifteenth of a window, two seconds of thirty …
_QUIET = 300  # … where a three hundredth of it, a tenth of a second, is the quietest

Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AudioWindow:
    """A part of the recording; both ends in seconds from its beginning."""

    samples: Samples  # f32[up to as many as a window has]
    start_s: float
    end_s: float


@final
class AudioFile:
    """Reads windows of up to ``window_samples`` samples, at ``rate`` samples a second.

    Raises: Refused for what is no sound, too long, or of another kind (400), and where a package of
    the extra is missing (501).
    """

    def __init__(self, data: bytes, *, rate: int, window_samples: int) -> None:
        try:
            import soundfile
            import soxr
        except (ImportError, OSError) as error:  # OSError: without libsndfile
            raise not_installed(ImportError(str(error))) from error
        _refuse_other_kinds(data)
        self._error = soundfile.SoundFileError
        try:
            self._file: Any = soundfile.SoundFile(io.BytesIO(data))
        except self._error as error:
            raise _bad(f"it cannot be read: {error}") from None
        self._rate, self._most = rate, window_samples
        own, channels, frames = self._file.samplerate, self._file.channels, self._file.frames
        if not 1 <= channels <= _MOST_CHANNELS:
            raise _bad(f"it has {channels} channels and may have {_MOST_CHANNELS}")
        if not _LEAST_RATE <= own <= _MOST_RATE:
            raise _bad(
                f"it has {format_count(own)} samples a second: from {format_count(_LEAST_RATE)} to "
                f"{format_count(_MOST_RATE)} are read"
            )
        if frames >= _UNKNOWN:
            raise _bad("its header has no length: write it to a file, and not to a pipe")
        if frames > MOST_SECONDS * own:
            raise _bad(
                f"it has {format_count(frames // own)} seconds and may have "
                f"{format_count(MOST_SECONDS)}: cut it and send it in several"
            )
        self._resampler: Any = soxr.ResampleStream(own, rate, 1) if own != rate else None
        self._held: Samples = np.empty(0, np.float32)
        self._is_over = False
        self._num_given = 0

    @property
    def seconds(self) -> float:
        """Return the seconds that its windows have so far."""
        return self._num_given / self._rate

    def next(self) -> AudioWindow | None:
        """Return the next window; None at the end. Raises: Refused (400)."""
        while len(self._held) <= self._most and not self._is_over:
            self._held = np.concatenate((self._held, self._piece()))
        if not len(self._held):
            if not self._num_given:
                raise _bad("it has no samples")
            return None
        end = len(self._held) if len(self._held) <= self._most else self._quietest()
        window, self._held = self._held[:end], self._held[end:]
        start_s = self.seconds
        self._num_given += end
        return AudioWindow(samples=window, start_s=start_s, end_s=self.seconds)

    def _piece(self) -> Samples:
        try:
            read = self._file.read(_PIECE // self._file.channels, dtype="float32", always_2d=True)
        except self._error as error:
            raise _bad(f"it ends too early: {error}") from None
        self._is_over = not len(read)
        if len(read) and not np.abs(read).max() < _LOUDEST:  # NaN fails this too
            raise _bad("it has samples that are not numbers, or far too loud")
        samples: Samples = read.mean(axis=1)
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=self._is_over)
        return samples

    def _quietest(self) -> int:
        """Return where a window ends: in the middle of the quietest moment near its end."""
        quiet = max(1, self._most // _QUIET)
        first = self._most - max(quiet, self._most // _SEARCHED)
        energy = np.cumsum(np.square(self._held[first : self._most], dtype=np.float64))
        energy = np.concatenate(([0.0], energy))
        return first + int(np.argmin(energy[quiet:] - energy[:-quiet])) + quiet // 2


def _refuse_other_kinds(data: bytes) -> None:
    """Refuse the twenty more kinds that libsndfile reads: few clients send them.
    Raises: Refused.
    """
    is_wave = data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE"
    is_mp3 = data[:3] == b"ID3" or (data[:1] == b"\xff" and data[1:2] >= b"\xe0")
    if not (is_wave or is_mp3 or data[:4] in (b"fLaC", b"OggS")):
        raise _bad(f"it begins with {data[:4]!r}: only WAV, FLAC, Ogg and MP3 are supported")


def _bad(why: str) -> Refused:
    return Refused(400, f"file: {why}", param="file", code="bad_audio")
