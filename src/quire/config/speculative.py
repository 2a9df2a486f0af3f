"""``SpeculativeConfig``: how tokens are guessed ahead."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.config.options import in_range, nearest, one_of
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed ahead; names are vLLM's.

    ``ngram`` looks up what followed the last time that a sequence's own tokens read like this, over
    the longest n-gram of ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens. ``draft_model``
    asks a smaller ``model`` of the same vocabulary: a folder, a hub name, or a model in memory.

    Raises: ConfigError naming the option, its value and its limit.
    """

    method: str | None = None  # None: draft_model where there is a model, else ngram
    num_speculative_tokens: int = 4  # at most
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    model: Any = None

    def __post_init__(self) -> None:
        if self.method is None:
            object.__setattr__(self, "method", "ngram" if self.model is None else "draft_model")
        one_of("speculative_config: method", str(self.method), ("ngram", "draft_model"))
        if (self.method == "draft_model") != (self.model is not None):
            raise ConfigError(
                f"speculative_config: method {self.method} "
                f"{'needs a' if self.model is None else 'takes no'} model"
            )
        for name, least, most in (
            ("num_speculative_tokens", 1, 64),
            ("prompt_lookup_min", 1, 64),
            ("prompt_lookup_max", self.prompt_lookup_min, 64),
        ):
            in_range(f"speculative_config: {name}", getattr(self, name), least, most)

    @classmethod
    def parse(cls, given: Any) -> "SpeculativeConfig | None":
        """From a JSON object, as text or as a mapping. Raises: ConfigError."""
        if given is None or isinstance(given, cls):
            return given
        if isinstance(given, str):
            try:
                given = json.loads(given)
            except ValueError as error:
                raise ConfigError(f"speculative_config {given!r} is not JSON: {error}") from error
        if not isinstance(given, Mapping):
            raise ConfigError(f"speculative_config={given!r} must be a JSON object")
        known = {option.name for option in fields(cls)}
        for name in given:
            if name not in known:
                raise ConfigError(f"speculative_config: unknown {name!r}{nearest(name, known)}")
        return cls(**given)
