"""A model's bytes besides its cache: by shape alone they are what the loaded model has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from quire import LLM, SamplingParams
from quire.errors import ModelNotLoadable
from quire.memory.host.huge_pages import huge_page_bytes
from quire.models.footprint import footprint, outline
from quire.models.loader import load
from tiny import tiny_model


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_an_outline_has_the_bytes_of_the_loaded_model(dtype: str) -> None:
    loaded = load(dtype=dtype)
    name, outlined, spec = outline(dtype=dtype)
    own = footprint(loaded.model)
    assert outlined.counted_bytes == 0
    assert (name, spec) == (loaded.name, loaded.spec)
    assert outlined.weights_bytes == own.weights_bytes
    assert outlined.activation_bytes(64, 4) == own.activation_bytes(64, 4)


def test_tied_weights_count_once() -> None:
    own, model = footprint(load().model), load().model
    tensors = [*model.parameters(), *model.buffers()]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert own.weights_bytes == sum(tensor.nbytes for tensor in tensors)


def test_weights_that_lie_in_a_file_are_not_counted_as_used() -> None:
    """The kernel calls their pages available; those of a model made in memory are used."""
    of_file = footprint(load(copy_weights=False).model)
    copied, in_memory = footprint(load().model), footprint(tiny_model("llama"))
    assert of_file.counted_bytes < of_file.weights_bytes // 100
    assert in_memory.counted_bytes == in_memory.weights_bytes
    assert copied.weights_bytes == of_file.weights_bytes
    if huge_page_bytes():
        assert copied.counted_bytes == copied.weights_bytes


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotLoadable):
        outline(tmp_path)


@pytest.mark.parametrize(("top_p", "temperature"), [(1.0, 0.0), (0.9, 1.0)])
def test_the_estimate_of_activations_is_above_what_a_step_takes(
    top_p: float, temperature: float
) -> None:
    """And by no more than a factor, for a step of as many tokens as there may be."""
    num_tokens, num_seqs = 256, 16
    loaded = load()
    params = SamplingParams(max_tokens=1, ignore_eos=True, top_p=top_p, temperature=temperature)
    prompts = [[(i + j) % 4000 for j in range(num_tokens // num_seqs)] for i in range(num_seqs)]
    options = {"max_num_batched_tokens": num_tokens, "max_num_seqs": num_seqs}
    with LLM(loaded, **options) as llm:
        llm.generate(prompts[:1], params)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
            llm.generate([[token + 1 for token in prompt] for prompt in prompts], params)
    events = [e for e in taken.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = torch.tensor([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).cumsum(0)
    estimate = footprint(loaded.model).activation_bytes(num_tokens, num_seqs)
    assert int(held.max()) <= estimate <= 4 * int(held.max())
