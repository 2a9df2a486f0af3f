"""What a speech model hears, and what its text begins with: what its files say of either.

Sound comes in windows, of each of which features are made. A text begins as Transformers'
``generate`` has it for a task and a language. Reading files of sound is left to the caller.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import RequestError
from quire.models.loader import LoadedModel, features_shape

Task: TypeAlias = Literal["transcribe", "translate"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Hearing:
    """Of one model. ``why_not``: why nothing can be said to it; empty otherwise."""

    name: str
    why_not: str = ""
    sampling_rate: int = 0  # samples a second
    window_samples: int = 0  # at most, in one source
    start: int = 0  # the token that every text begins with
    language_ids: Mapping[str, int] = field(default_factory=dict)  # by code; none: one language
    _task_ids: Mapping[str, int] = field(default_factory=dict)
    _begins: tuple[int, ...] = ()  # of a model with one language
    _no_timestamps: int | None = None
    _previous: int | None = None  # the token in front of what was said before
    _most_previous: int = 0  # tokens of that, itself included
    _languages: Mapping[str, str] = field(default_factory=dict)  # names by code
    _extractor: Any = None
    _tokenizer: Any = None

    @classmethod
    def of(cls, loaded: LoadedModel, begins: tuple[int, ...], max_model_len: int) -> "Hearing":
        """Read a model's; ``begins`` is what ``generate`` begins with if no language is given.

        ``max_model_len``: tokens of a text, of which half may be what was said before.
        """
        if why_not := _why_not(loaded, begins):
            return cls(name=loaded.name, why_not=why_not)
        from transformers.models.whisper.tokenization_whisper import LANGUAGES

        said: Any = loaded.model.generation_config
        is_multilingual = getattr(said, "is_multilingual", True) is not False
        languages = getattr(said, "lang_to_id", None) if is_multilingual else None
        extractor = loaded.feature_extractor
        return cls(
            name=loaded.name,
            sampling_rate=extractor.sampling_rate,
            window_samples=extractor.n_samples,
            start=begins[0],
            language_ids={name.strip("<|>"): own for name, own in (languages or {}).items()},
            _task_ids=dict(getattr(said, "task_to_id", None) or {}),
            _begins=begins,
            _no_timestamps=getattr(said, "no_timestamps_token_id", None),
            _previous=getattr(said, "prev_sot_token_id", None),
            _most_previous=max_model_len // 2 - 1,
            _languages=LANGUAGES,
            _extractor=extractor,
            _tokenizer=loaded.tokenizer,
        )

    def check(self, task: Task) -> None:
        """Check a task. Raises: RequestError for a model that hears nothing, or lacks the task."""
        if self.why_not:
            raise RequestError(f"{self.name} cannot transcribe: {self.why_not}")
        if task == "translate" and not (self.language_ids and task in self._task_ids):
            raise RequestError(f"{self.name} was not trained to translate: ask for a transcription")

    def features(self, samples: NDArray[np.float32]) -> Tensor:
        """Compute the model's input: f32[up to window_samples] → f32[mels, frames]."""
        made = self._extractor(samples, sampling_rate=self.sampling_rate, return_tensors="pt")
        features: Tensor = made.input_features[0]
        return features

    def language_of(self, given: str) -> str:
        """Return a language's code by its code or its name. Raises: RequestError."""
        code = next((own for own, name in self._languages.items() if name == given.lower()), given)
        code = code.lower()
        if code not in self.language_ids and (self.language_ids or code != "en"):
            known = ", ".join(sorted(self.language_ids)) or "en"
            raise RequestError(f"language={given[:40]!r}: {self.name} knows {known}")
        return code

    def name_of(self, code: str) -> str:
        """Return a language's name, in English."""
        return self._languages.get(code, code)

    def begins(self, task: Task, language: str) -> tuple[int, ...]:
        """Return the tokens that a text begins with."""
        begins = self._begins
        if self.language_ids:
            own = self._task_ids.get(task)
            begins = (self.start, self.language_ids[language], *(() if own is None else (own,)))
        if self._no_timestamps is None or begins[-1] == self._no_timestamps:
            return begins
        return (*begins, self._no_timestamps)

    def previous(self, text: str) -> tuple[int, ...]:
        """Return the last tokens of what was said before, to stand in front of a text's first ones.

        Raises: RequestError for a model that is told nothing of it, or special tokens.
        """
        if self._previous is None:
            raise RequestError(
                f"prompt: the generation config of {self.name} has no prev_sot_token_id, which "
                "marks an earlier text: leave it out"
            )
        token_ids = self._tokenizer(" " + text.strip(), add_special_tokens=False)["input_ids"]
        if special := {self.start, *self._tokenizer.all_special_ids}.intersection(token_ids):
            word = self._tokenizer.convert_ids_to_tokens(min(special))
            raise RequestError(f"prompt: {word} is a special token, and no text")
        return (self._previous, *token_ids[1 - self._most_previous :])


def _why_not(loaded: LoadedModel, begins: tuple[int, ...]) -> str:
    if features_shape(loaded) is None:
        return "it reads text"
    if loaded.model.config.model_type != "whisper":
        return "of speech models, only Whisper's texts are known to begin with a language"
    if not begins:
        return "its configs say in no decoder_start_token_id what a text begins with"
    from transformers import WhisperFeatureExtractor

    if not isinstance(loaded.feature_extractor, WhisperFeatureExtractor):
        return "it came without Whisper's feature extractor (preprocessor_config.json)"
    if loaded.tokenizer is None:
        return "it came without a tokenizer, and what it says would be token ids"
    return ""
