"""A tiny model of a class, with random weights that make its tokens differ."""

import torch
from transformers import PreTrainedModel

from zoo.sizes import causal_class, tiny_config

_WIDTH, _SHIFT = 0.08, 0.05


def tiny_model(model_type: str) -> PreTrainedModel:
    """In float32, with the attention of its own that is easiest to trust (eager)."""
    config = tiny_config(model_type)
    torch.manual_seed(0)
    model = causal_class(model_type)._from_config(config, attn_implementation="eager")
    model = model.eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, _WIDTH)
            else:  # gains stay near one; biases and sinks come to say something
                parameter.add_(torch.randn_like(parameter), alpha=_SHIFT)
    return model
