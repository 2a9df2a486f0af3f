"""What a model with recurrent layers, or with sources, cannot have of an engine: guesses.

A state stands for all tokens so far, and it is the only one of its sequence. It cannot be taken
back to an earlier token. Of a source a guess knows nothing.
"""

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.models.loader import LoadedModel


def refuse_speculation(config: EngineConfig, loaded: LoadedModel) -> None:
    """Raises: ConfigError for guesses at what a model with recurrent layers, or a source, says."""
    if loaded.spec.source_tokens and config.speculative_config is not None:
        raise ConfigError(
            f"speculative_config: {loaded.name} answers a source, of which neither its text so far "
            f"nor a draft model knows, so that guesses would rarely come true: leave it out"
        )
    layers = list(loaded.spec.recurrent_layers)
    if layers and config.speculative_config is not None:
        raise ConfigError(
            f"speculative_config: layers {layers} of {loaded.name} keep a recurrent state, which "
            f"cannot be taken back where a guess was wrong: leave it out"
        )


def refuse_recurrent_draft(draft: LoadedModel) -> None:
    """Raises: ConfigError."""
    if draft.spec.source_tokens:
        raise ConfigError(
            f"speculative_config: the draft model {draft.name} reads a source: use another one"
        )
    if draft.spec.recurrent_layers:
        raise ConfigError(
            f"speculative_config: layers {list(draft.spec.recurrent_layers)} of the draft model "
            f"{draft.name} keep a recurrent state, which cannot be taken back where a guess was "
            f"wrong: use another one"
        )
