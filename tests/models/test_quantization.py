"""Weights in 8 and 4 bits: what they take, what stays as it is, and that the engine runs them."""

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ModelNotLoadable
from quire.kernels.compile import usable_isa
from quire.layers.packed_linear import PackedLinear
from quire.models.footprint import footprint
from quire.models.fused_modules import FusedModules
from quire.models.loader import LoadedModel, load
from quire.models.quantized import put, quantizable, quantize_layers
from quire.planner.subject import find_subject
from quire.spec.weight_forms import WEIGHT_FORMS, weight_form
from zoo.build import tiny_model

# More than are computed before passes are recorded.
GREEDY = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
# The second one is of more rows than are multiplied as codes.
PROMPTS = ["def fibonacci(n):\n", "import os\n\n" + "x = [1, 2, 3]\n" * 60]


def linears(loaded: LoadedModel) -> Iterator[tuple[str, PackedLinear]]:
    for name, module in loaded.model.named_modules():
        if isinstance(module, PackedLinear):
            yield name, module


@pytest.mark.parametrize("name", ["int8", "int4", "int4-g128-asym"])
def test_they_take_what_is_planned(name: str) -> None:
    loaded, planned = load(quantization=name), find_subject(quantization=name).own
    weighed = footprint(loaded.model)
    form = weight_form(name)
    in_files = loaded.model.state_dict()
    computed = sum(b.nbytes for n, b in loaded.model.named_buffers() if n not in in_files)
    taken = weighed.weights_bytes - computed
    if form.group_size == 32:
        assert planned.weights_bytes == taken
    else:  # a row of 704 ends inside of a group of 128, which the planner doesn't see
        assert taken * 0.98 <= planned.weights_bytes <= taken
    assert weighed.widest_rows == planned.widest_rows
    assert find_subject(weights=name[:4]).own.weights_bytes <= planned.weights_bytes * 1.05


def test_linear_layers_are_packed_and_nothing_else() -> None:
    plain, loaded = load(), load(quantization="int4")
    before = {n for n, m in plain.model.named_modules() if type(m) is nn.Linear}
    assert {n for n, _ in linears(loaded)} == before - {"lm_head"}
    head, table = loaded.model.get_output_embeddings(), loaded.model.get_input_embeddings()
    assert type(head) is nn.Linear
    assert head.weight is table.weight  # tied, as they were
    assert loaded.dtype == plain.dtype
    assert torch.equal(table.weight, plain.model.get_input_embeddings().weight)


def test_layers_whose_weights_a_class_reads_itself_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.models.quantized.BLOCK", 8)  # tiny layers, too
    model = tiny_model("mamba")
    before = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    names = {name for name, _ in quantizable(model)}
    assert names
    assert {name.rpartition(".")[2] for name in before - names} >= {"dt_proj"}


def test_what_attention_to_latents_takes_apart_is_left() -> None:
    names = [n for n, _ in quantizable(tiny_model("deepseek_v3"))]
    assert names
    assert not any(name.endswith("kv_b_proj") for name in names)


@pytest.mark.parametrize("name", ["int8", "int4", "int4-g32-asym"])
def test_tokens_are_those_of_a_model_with_the_same_numbers_as_weights(name: str) -> None:
    loaded, twin = (load(dtype="float32", quantization=q) for q in (name, None))
    for where, layer in linears(loaded):
        own = twin.model.get_submodule(where)
        own.weight.data = layer.packed_weight.dequantized()
    with LLM(
        dtype="float32", quantization=name, kv_cache_memory_bytes="32MiB", max_num_seqs=2
    ) as llm:
        completions = llm.generate(PROMPTS, GREEDY)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = twin.tokenizer(prompt, return_tensors="pt")
        out = twin.model.generate(**ids, do_sample=False, max_new_tokens=32, min_new_tokens=32)
        assert list(completion.token_ids) == out[0, ids["input_ids"].shape[1] :].tolist()


def test_kernels_stand_in_for_all_of_them() -> None:
    loaded = load(quantization="int4")
    parts = FusedModules(loaded.model)._parts
    inside = {id(m) for part in parts for m in (part.module, *part.inside)}
    assert all(id(layer) in inside for _, layer in linears(loaded))


@pytest.mark.parametrize("multiplies_bytes", [True, False])
def test_inputs_are_rounded_where_bytes_are_multiplied_unless_it_is_turned_off(
    monkeypatch: pytest.MonkeyPatch, *, multiplies_bytes: bool
) -> None:
    here = replace(usable_isa(), byte_dot=multiplies_bytes)
    monkeypatch.setattr("quire.models.quantized.usable_isa", lambda: here)
    for options, expected in (
        ({}, multiplies_bytes),
        ({"dynamic_quantization": False}, False),
        ({"dtype": "float32"}, False),
    ):
        loaded = load(quantization="int4", **options)
        assert {layer.rounds_inputs for _, layer in linears(loaded)} == {expected}


def test_a_model_in_memory_rounds_as_it_was_loaded() -> None:
    loaded = load(quantization="int8")
    next(linears(loaded))[1].rounds_inputs = True
    with pytest.raises(ConfigError, match="dynamic_quantization=False: the model was loaded with"):
        LLM(loaded, dynamic_quantization=False)


def test_a_model_that_is_cast_computes_in_its_new_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kind that has biases, which follow the cast."""
    monkeypatch.setattr("quire.models.quantized.BLOCK", 8)  # tiny layers, too
    model, ids = tiny_model("qwen2"), [*range(3, 43)]
    quantize_layers(model, weight_form("int8-g32"), "here")
    layers = [m for m in model.modules() if isinstance(m, PackedLinear)]
    found = []
    for cast in (model.float, model.bfloat16):
        with LLM(cast(), kv_cache_memory_bytes="4MiB") as llm:
            (completion,) = llm.generate([ids], replace(GREEDY, max_tokens=4))
        found.append(completion.token_ids)
        assert {layer.dtype for layer in layers} == {model.dtype}
    assert found[0] == found[1]
    assert model.dtype == torch.bfloat16


def test_weights_that_are_no_numbers_are_named() -> None:
    loaded = load()
    loaded.model.model.layers[3].mlp.up_proj.weight.data[5, 7] = torch.nan
    with pytest.raises(ModelNotLoadable, match=r"here: model\.layers\.3\.mlp\.up_proj cannot"):
        quantize_layers(loaded.model, weight_form("int8"), "here")


def test_a_layer_is_put_in_place_by_its_name() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    other = nn.Identity()
    put(model, "0.0", other)
    assert model[0][0] is other


def test_a_gpu_has_torchaos_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.models.loader.choose_device", lambda _: torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"int4 is for a CPU, .* choose quantization=int8, or"):
        load(quantization="int4")
    with pytest.raises(ConfigError, match=r"int8 on cuda:0 needs torchao .*quire-kv\[int8\]"):
        load(quantization="int8")


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization 'int3' is unknown; known: int8, int4, int"):
        LLM(quantization="int3")
    with pytest.raises(ConfigError, match="quantize the model first"):
        LLM(load(), quantization="int8")
    assert {form.name for form in WEIGHT_FORMS.values()} <= WEIGHT_FORMS.keys()
