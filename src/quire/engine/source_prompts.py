"""Prompts of encoder-decoders: the source that the encoder reads, and how the text begins.

A caller's prompt is the source. The text begins as with Transformers' ``generate``: with the
decoder's start token, and the tokens that the generation config forces after it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, final

from torch import Tensor

from quire.engine.prompts import encode
from quire.errors import RequestError, RequestTooLong
from quire.models.executors.encoder_source import Source
from quire.models.loader import LoadedModel, features_shape
from quire.units import format_count

_SOURCE, _TEXT = "source", "prompt_token_ids"


@final
class SourcePrompts:
    """Reads the prompts of one model, whose sources have at most ``source_tokens``."""

    def __init__(self, loaded: LoadedModel, source_tokens: int) -> None:
        self._name, self._tokenizer = loaded.name, loaded.tokenizer
        self._vocab_size, self._longest = loaded.vocab_size, loaded.spec.source_tokens
        self._most_tokens = source_tokens
        self._features_shape = features_shape(loaded)
        self.text_begins = _text_begins(loaded)
        self.suppressed = _suppressed(loaded, "suppress_tokens")
        self.suppressed_first = _suppressed(loaded, "begin_suppress_tokens")

    def read(self, prompt: object) -> tuple[Source, tuple[int, ...]]:
        """Return the source of a prompt, and the token ids with which its text begins.

        Raises: RequestError; RequestTooLong for a source without room.
        """
        given, begins = prompt, self.text_begins
        if isinstance(prompt, Mapping):
            unknown = sorted(str(name) for name in prompt.keys() - {_SOURCE, _TEXT})
            if unknown or _SOURCE not in prompt:
                raise RequestError(
                    f"a prompt of {self._name} has {_SOURCE!r} and may have {_TEXT!r}; this "
                    f"one has {sorted(map(str, prompt)) or 'neither'}"
                )
            given = prompt[_SOURCE]
            if prompt.get(_TEXT) is not None:
                begins = self._token_ids(_TEXT, prompt[_TEXT])
        if not begins:
            raise RequestError(
                f"{self._name} says in no decoder_start_token_id what a text begins with: "
                f"give {_TEXT!r} beside {_SOURCE!r}"
            )
        if self._features_shape is not None:
            return self._features(given), begins
        return self._text(given), begins

    def _text(self, given: object) -> Source:
        if isinstance(given, Tensor):
            given = given.tolist()
        token_ids = encode(given, self._tokenizer, self._vocab_size)
        if len(token_ids) > self._most_tokens:
            raise RequestTooLong(
                f"the source has {format_count(len(token_ids))} tokens and there is room for "
                f"{format_count(self._most_tokens)}: shorten it"
                + (" or raise max_model_len" if self._most_tokens < self._longest else "")
            )
        return Source(num_tokens=len(token_ids), token_ids=token_ids)

    def _features(self, given: object) -> Source:
        assert self._features_shape is not None
        mels, frames = self._features_shape
        shape = list(given.shape) if isinstance(given, Tensor) else type(given).__name__
        if not isinstance(given, Tensor) or given.shape[-2:] != self._features_shape:
            raise RequestError(
                f"{self._name} hears input_features, a tensor [{mels}, {frames}] as its "
                f"feature extractor makes it; this is {shape}"
            )
        if given.numel() != mels * frames or not given.is_floating_point():
            raise RequestError(f"one source a prompt, in floating point; this is {shape}")
        return Source(
            num_tokens=self._longest,
            features=given.detach().reshape(mels, frames),
        )

    def _token_ids(self, name: str, given: Any) -> tuple[int, ...]:
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise RequestError(f"{name} are token ids; this is {type(given).__name__}")
        given = given.tolist() if isinstance(given, Tensor) else list(given)
        return encode(given, None, self._vocab_size)


def _suppressed(loaded: LoadedModel, name: str) -> tuple[int, ...]:
    """Return tokens that the generation config bars, everywhere or at the beginning."""
    said = getattr(loaded.model.generation_config, name, None) or ()
    return tuple(token_id for token_id in said if 0 <= token_id < loaded.vocab_size)


def _text_begins(loaded: LoadedModel) -> tuple[int, ...]:
    """Return the tokens with which ``generate`` begins a text, if a config says so."""
    configs = (loaded.model.generation_config, loaded.model.config)

    def stated(name: str) -> Any:
        values = (getattr(config, name, None) for config in configs)
        return next((value for value in values if value is not None), None)

    start = stated("decoder_start_token_id")
    start = stated("bos_token_id") if start is None else start
    if not isinstance(start, int):
        return ()
    forced = dict(stated("forced_decoder_ids") or ())  # place → token
    if (first := stated("forced_bos_token_id")) is not None:
        forced.setdefault(1, first)
    begins = [start]
    while forced.get(len(begins)) is not None:
        begins.append(forced[len(begins)])
    return tuple(begins)
