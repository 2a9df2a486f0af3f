"""What no engine is assembled for: sizes with which a model, or a cache, could serve no request."""

from collections.abc import Mapping

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kv import Accounting, Never
from quire.models.loader import LoadedModel
from quire.units import format_bytes, format_count

# -- sizes -----------------------------------------------------------------------------------------


_TRIAL_ID = -1  # requests count from 1


def refuse_switching_positions(loaded: LoadedModel, max_model_len: int) -> None:
    """Raises: ConfigError where one long sequence would turn the positions of all others.

    Transformers' "longrope" takes other frequencies for a whole batch as soon as one of its
    positions is past the length of the original training.
    """
    parameters = getattr(loaded.model.config.get_text_config(), "rope_parameters", None) or {}
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, Mapping) and rope.get("rope_type") == "longrope":
            limit = rope["original_max_position_embeddings"]
            if max_model_len > limit:
                raise ConfigError(
                    f"{loaded.name} turns its positions otherwise past {format_count(limit)} "
                    f"tokens (longrope), which cannot be done for one sequence of a batch: "
                    f"max_model_len={format_count(max_model_len)} must be at most "
                    f"{format_count(limit)}"
                )


def refuse_too_little(accounting: Accounting, max_tokens: int) -> None:
    """Raises: ConfigError for a cache in which no sequence, however short, finds room."""
    least = min(max_tokens, 2)  # a prompt and a token
    accounting.add(_TRIAL_ID, max_tokens=least)
    verdict = accounting.try_extend(_TRIAL_ID, least)
    accounting.free(_TRIAL_ID)
    accounting.drain()
    if isinstance(verdict, Never):
        raise ConfigError(
            f"{format_bytes(verdict.capacity_bytes)} of KV memory cannot hold even a short "
            f"sequence, which takes {format_bytes(verdict.need_bytes)}: raise "
            f"kv_cache_memory_bytes or lower what one sequence takes (max_model_len, block_size, "
            f"growth_tokens)"
        )


# -- recurrent layers ------------------------------------------------------------------------------

# What a model with recurrent layers, or with sources, cannot have of an engine: guesses.
#
# A state stands for all tokens so far, and it is the only one of its sequence. It cannot be taken
# back to an earlier token. Of a source a guess knows nothing.


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
