"""A tiny model of a class, with random weights that make its tokens differ."""

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from zoo.sizes import causal_class, tiny_config

_WIDTH, _SHIFT = 0.08, 0.05


def tiny_model(model_type: str) -> PreTrainedModel:
    """In float32, with the attention of its own that is easiest to trust (eager)."""
    return with_random_weights(causal_class(model_type), tiny_config(model_type))


def with_random_weights(own: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model of a class and a config, in float32 with eager attention."""
    torch.manual_seed(0)
    made = own._from_config(config, attn_implementation="eager")
    model: PreTrainedModel = made.eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, _WIDTH)
            else:  # gains stay near one; biases and sinks come to say something
                parameter.add_(torch.randn_like(parameter), alpha=_SHIFT)
    return model
