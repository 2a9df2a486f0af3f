"""What a model with recurrent layers asks of an engine, and what it cannot have.

A state stands for all tokens so far. It can be neither shared from an earlier token on nor taken
back to one, so what rests on that is left out, which the log says, or refused.
"""

import logging
from dataclasses import replace

from quire.config import EngineConfig
from quire.errors import ConfigError, UnsupportedModel
from quire.models.loader import LoadedModel

log = logging.getLogger(__name__)


def fit_options(config: EngineConfig, loaded: LoadedModel) -> EngineConfig:
    """The options as the model can have them.

    Raises: ConfigError for speculation; UnsupportedModel for nothing but recurrent layers.
    """
    layers = list(loaded.spec.recurrent_layers)
    if not layers:
        return config
    if not loaded.spec.bytes_per_token:
        raise UnsupportedModel(
            f"{loaded.spec.model_type}: layers {layers} keep a recurrent state and no layer keeps "
            f"keys and values, so there is nothing for a cache strategy to hold; "
            f"model.generate(past_key_values=quire.cache(model)) runs it"
        )
    if config.speculative_config is not None:
        raise ConfigError(
            f"speculative_config: layers {layers} of {loaded.name} keep a recurrent state, which "
            f"cannot be taken back where a guess was wrong: leave it out"
        )
    if config.enable_prefix_caching:
        log.warning(
            "%s: no prefix caching, for layers %s keep recurrent states, and those of earlier "
            "tokens are not kept",
            loaded.name,
            layers,
        )
    if config.swap_space:
        log.warning("%s: no swap_space, for recurrent states are not swapped out", loaded.name)
    return replace(config, enable_prefix_caching=False, swap_space=0, swap_path=None)


def refuse_recurrent_draft(draft: LoadedModel) -> None:
    """Raises: ConfigError."""
    if draft.spec.recurrent_layers:
        raise ConfigError(
            f"speculative_config: layers {list(draft.spec.recurrent_layers)} of the draft model "
            f"{draft.name} keep a recurrent state, which cannot be taken back where a guess was "
            f"wrong: use another one"
        )
