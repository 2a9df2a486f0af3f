"""Weights in eight bits: what they take, and that the engine runs them as Transformers does."""

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.models.footprint import footprint
from quire.models.loader import load

# Not among the test requirements: where it is installed, Transformers imports it at once, which
# takes seconds in every process.
pytest.importorskip("torchao", reason="needs quire[int8]")
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def test_linear_layers_take_half_the_bytes() -> None:
    plain, codes = load(), load(quantization="int8")
    linear = sum(
        module.weight.numel()
        for name, module in plain.model.named_modules()
        if name.endswith("_proj")
    )
    saved = footprint(plain.model).weights_bytes - footprint(codes.model).weights_bytes
    scales = sum(
        5 * module.weight.shape[0]  # a scale in float32 and a zero point for each output
        for name, module in plain.model.named_modules()
        if name.endswith("_proj")
    )
    assert saved == linear - scales


def test_the_engine_gives_the_tokens_of_generate() -> None:
    loaded = load(quantization="int8")
    prompt = "def fibonacci(n):\n"
    with LLM(quantization="int8", kv_cache_memory_bytes="8MiB") as llm:
        (completion,) = llm.generate(prompt, GREEDY)
    ids = loaded.tokenizer(prompt, return_tensors="pt")
    out = loaded.model.generate(**ids, do_sample=False, max_new_tokens=8, min_new_tokens=8)
    assert list(completion.token_ids) == out[0, ids["input_ids"].shape[1] :].tolist()


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization 'int3' is unknown; known: int8"):
        LLM(quantization="int3")
    with pytest.raises(ConfigError, match="quantize the model first"):
        LLM(load(), quantization="int8")
