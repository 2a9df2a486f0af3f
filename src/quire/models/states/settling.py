"""How modules that keep a state go on from one chunk of a sequence to the next: tried out.

They all should give, chunk by chunk, what they give at once. Some begin their scan anew with each
chunk of several tokens (Jamba's, in Transformers itself), and get those one by one then.
"""

import inspect
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.models.states.mixers import Mixer, Parts, side_by_side


def settle(
    model: PreTrainedModel,
    mixers: Sequence[Mixer],
    token_ids: Sequence[int],
    stops: Sequence[int],
    limit: float,
) -> tuple[list[Mixer], float]:
    """Return the modules as they must be called, and how far outputs are from those in one go.

    Tried on what a pass over the tokens gives them, in chunks that end at ``stops``, for one module
    of each class. In float32, where rounding does not hide it: of the largest output. Those that
    are off by more than ``limit`` get the tokens of later chunks one by one.
    """
    given = _calls(model, mixers, token_ids)
    found: dict[type[nn.Module], tuple[Mixer, float]] = {}
    for mixer in mixers:
        kind, bound = type(mixer.module), given[mixer.module]
        if kind in found:
            continue
        tried = replace(mixer, along=_along(bound, len(token_ids)))
        deviation = _deviation(tried, bound, stops)
        if not deviation <= limit:
            tried = replace(tried, goes_on_by_tokens=True)
            deviation = _deviation(tried, bound, stops)
        found[kind] = tried, deviation
    settled: list[Mixer] = []
    for mixer in mixers:
        like, _ = found[type(mixer.module)]
        settled.append(replace(mixer, along=like.along, goes_on_by_tokens=like.goes_on_by_tokens))
    return settled, max(deviation for _, deviation in found.values())


def _calls(
    model: PreTrainedModel, mixers: Sequence[Mixer], token_ids: Sequence[int]
) -> dict[nn.Module, inspect.BoundArguments]:
    """What each module is given in a pass over the tokens."""
    found: dict[nn.Module, inspect.BoundArguments] = {}

    def note(mixer: Mixer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[mixer.module] = mixer.bind(args, kwargs)

    handles = [
        mixer.module.register_forward_pre_hook(partial(note, mixer), with_kwargs=True)
        for mixer in mixers
    ]
    try:
        with torch.inference_mode():
            model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _along(bound: inspect.BoundArguments, num_tokens: int) -> tuple[str, ...]:
    """Names of arguments that have a row for each token."""
    return tuple(
        name
        for name, value in bound.arguments.items()
        if isinstance(value, Tensor) and value.shape[:2] == (1, num_tokens)
    )


def _deviation(mixer: Mixer, bound: inspect.BoundArguments, stops: Sequence[int]) -> float:
    """How far outputs in chunks are from those in one, of the largest of them."""
    mixer = replace(mixer, module=deepcopy(mixer.module).float())
    forward = mixer.module.forward
    exact = inspect.BoundArguments(mixer.signature, _in_float32(bound.arguments))
    with torch.inference_mode():
        whole, parts = (_in_chunks(mixer, forward, exact, s) for s in (stops[-1:], stops))
    return max(
        float((part - each).abs().max() / each.abs().max())
        for part, each in zip(parts, whole, strict=True)
        if part is not None and each is not None
    )


def _in_float32(arguments: Mapping[str, Any]) -> "OrderedDict[str, Any]":
    return OrderedDict(
        (name, value.float() if isinstance(value, Tensor) and value.is_floating_point() else value)
        for name, value in arguments.items()
    )


def _in_chunks(
    mixer: Mixer, forward: Any, bound: inspect.BoundArguments, stops: Sequence[int]
) -> Parts:
    """A module's outputs for one sequence, from the beginning."""
    device = bound.arguments[mixer.hidden_name].device
    state, places = mixer.no_state(), torch.arange(stops[-1], device=device)[None]
    return side_by_side(
        [
            mixer.compute(forward, bound, places[:, start:stop], state, goes_on=start > 0)
            for start, stop in pairwise([0, *stops])
        ]
    )
