"""GGUF files: the very numbers of the file, in the bytes of the file where they are codes."""

import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import quire
from models.gguf_files import ARCHITECTURES, write_gguf
from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.kv_fingerprint import planned_fingerprint
from quire.errors import ConfigError, ModelNotLoadable
from quire.layers.packed_linear import PackedLinear
from quire.models.footprint import footprint
from quire.models.loader import LoadedModel, load
from quire.planner.subject import find_subject
from quire.spec.gguf_file import read_gguf
from zoo.build import tiny_model

DEMO = Path(quire.__file__).parent / "demo_model"
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPT = "def fibonacci(n):\n"
IDS = torch.arange(3, 43).unsqueeze(0)


def made(path: Path, model_type: str, kind: str = "Q8_0", **fields: object) -> PreTrainedModel:
    """A tiny model with the numbers of its file."""
    model = tiny_model(model_type)
    if model_type == "mistral":
        model.config.sliding_window = None  # ggml has none for its architecture
    if model_type == "gemma3_text":
        fields["attention.sliding_window_pattern"] = 2
    write_gguf(path, model, kind, **fields)
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def packed(loaded: LoadedModel) -> dict[str, PackedLinear]:
    return {n: m for n, m in loaded.model.named_modules() if isinstance(m, PackedLinear)}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_its_numbers_are_those_of_the_file(kind: str, model_type: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    twin = made(path, model_type, kind)
    loaded = load(path, dtype="float32")
    assert type(loaded.model).__name__ == type(twin).__name__.replace("Mistral", "Llama")
    layers = packed(loaded)
    assert layers.keys() == {
        name
        for name, module in twin.named_modules()
        if type(module) is nn.Linear and not (name == "lm_head" and twin.config.tie_word_embeddings)
    }
    for where, layer in layers.items():
        assert torch.equal(layer.packed_weight.dequantized(), twin.get_submodule(where).weight)
    torch.testing.assert_close(logits(loaded.model), logits(twin), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("model_type", "kind"), [("llama", "Q4_0"), ("gemma2", "Q8_0")])
def test_its_tokens_are_those_of_the_same_numbers(
    model_type: str, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    twin = made(path, model_type, kind)
    out = twin.generate(IDS, do_sample=False, max_new_tokens=24, min_new_tokens=24)
    with LLM(path, tokenizer=DEMO, dtype="float32", kv_cache_memory_bytes="4MiB") as llm:
        (completion,) = llm.generate([IDS[0].tolist()], GREEDY)
        assert llm.tokenizer.decode(llm.tokenizer(PROMPT)["input_ids"]) == PROMPT
    assert list(completion.token_ids) == out[0, IDS.shape[1] :].tolist()


def test_longer_contexts_by_divisors_of_frequencies(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model("llama")
    model.config.rope_parameters = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = with_frequencies(model)
    plain = type(model.model.rotary_emb)(tiny_model("llama").config).inv_freq
    divisors = plain / model.model.rotary_emb.inv_freq
    assert divisors.max() > 7
    write_gguf(path, model, divisors=divisors)
    loaded = load(path, dtype="float32")
    torch.testing.assert_close(logits(loaded.model), logits(model), atol=1e-5, rtol=1e-5)
    write_gguf(path, model, divisors=divisors[1:])
    with pytest.raises(
        ModelNotLoadable, match=r"rope_freqs.weight does not fit .*: \[7\] divisors"
    ):
        load(path)


def with_frequencies(model: PreTrainedModel) -> PreTrainedModel:
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """The demo model in Q8_0, with its tokenizer beside it; and the same numbers in float32."""
    folder = tmp_path_factory.mktemp("demo")
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    write_gguf(folder / "demo-Q8_0.gguf", model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((DEMO / name).read_bytes())
    return folder, model


def test_a_folder_with_one_and_a_tokenizer_runs(demo: tuple[Path, PreTrainedModel]) -> None:
    folder, twin = demo
    options = EngineConfig(dtype="float32", kv_cache_memory_bytes=2**24)
    planned = planned_fingerprint(folder, options)
    with LLM(str(folder), dtype="float32", kv_cache_memory_bytes="16MiB") as llm:
        (completion,) = llm.generate(PROMPT, GREEDY)
        ids = llm.tokenizer(PROMPT, return_tensors="pt")
        assert llm.fingerprint().namespace == planned.namespace
    out = twin.generate(**ids, do_sample=False, max_new_tokens=24, min_new_tokens=24)
    assert list(completion.token_ids) == out[0, ids["input_ids"].shape[1] :].tolist()


def test_it_takes_what_is_planned(demo: tuple[Path, PreTrainedModel]) -> None:
    folder, _ = demo
    loaded, subject = load(folder), find_subject(str(folder))
    weighed, planned = footprint(loaded.model), subject.own
    in_files = loaded.model.state_dict()
    computed = sum(b.nbytes for n, b in loaded.model.named_buffers() if n not in in_files)
    assert planned.weights_bytes == weighed.weights_bytes - computed
    assert planned.widest_rows == weighed.widest_rows
    assert subject.precision.name == "GGUF Q8_0"
    assert subject.precision.bits == 8.5
    assert loaded.dtype == "bfloat16"


def test_a_tokenizer_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.gguf"
    made(path, "qwen3")
    loaded = load(path)
    assert loaded.tokenizer is None
    assert "without a usable tokenizer" in caplog.text
    assert "name the model's own by tokenizer=" in caplog.text
    with pytest.raises(ConfigError, match="give a model in memory its tokenizer itself"):
        LLM(loaded, tokenizer=str(DEMO))


def test_its_own_tokenizer(tmp_path: Path) -> None:
    """As llama.cpp's script writes one of bytes; how text is split is known by a name."""
    path, own = tmp_path / "model.gguf", AutoTokenizer.from_pretrained(DEMO)
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    write_gguf(path, model, tokenizer=own)
    found = load(path).tokenizer
    text = "return other"
    assert found(text)["input_ids"] == own(text)["input_ids"]
    assert found.decode(own(PROMPT)["input_ids"]) == PROMPT
    assert found.eos_token_id == own.eos_token_id


def test_what_is_no_code_becomes_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "model.gguf"
    model = tiny_model("llama")
    write_gguf(path, model, "Q4_0", others={"output.weight": "F16", "blk.1.ffn_up.weight": "Q5_0"})
    loaded = load(path, dtype="float32")
    torch.testing.assert_close(logits(loaded.model), logits(model), atol=1e-5, rtol=1e-5)
    assert "model.layers.1.mlp.up_proj" not in packed(loaded)
    said = {r.getMessage(): r.levelname for r in caplog.records if "expanded" in r.getMessage()}
    table, other = sorted(said)
    assert table.startswith("model.gguf: 1 matrices in Q4_0 are expanded to float32: 49.75 KiB")
    assert other.startswith("model.gguf: 1 matrices in Q5_0 are expanded to float32: 24.00 KiB")
    assert [said[table], said[other]] == ["INFO", "WARNING"]


def test_numbers_alone_are_quantized_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32), "F32")
    assert load(path).dtype == "float32"
    assert len(packed(load(path, quantization="int8"))) == 56


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    made(path, "llama")
    with pytest.raises(ConfigError, match=r"quantized already, in Q8_0: leave the option out"):
        load(path, quantization="int8")
    with pytest.raises(ConfigError, match="not divided among ranks"):
        load(path, num_ranks=2)
    made(path, "llama", **{"feed_forward_length": 64})
    with pytest.raises(
        ModelNotLoadable, match=r"blk\.0\.ffn_gate\.weight is \[96, 64\], and its h"
    ):
        load(path)
    made(path, "llama", **{"block_count": 3})
    with pytest.raises(ModelNotLoadable, match=r"has 9 tensors that LlamaForCausalLM does not hav"):
        load(path)
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    with pytest.raises(
        ConfigError, match=r"needs the package gguf .*pip install 'quire-kv\[gguf\]'"
    ):
        load(path)


def test_scales_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    made(path, "llama")
    place = read_gguf(path).tensors["blk.2.attn_v.weight"].begin
    content = bytearray(path.read_bytes())
    content[place + 34 * 3 : place + 34 * 3 + 2] = b"\x00\x7c"  # infinity
    path.write_bytes(content)
    with pytest.raises(ModelNotLoadable, match=r"layers\.2\.self_attn\.v_proj: there are scales"):
        load(path)


def test_a_vector_of_codes_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny_model("llama"), others={"blk.1.ffn_norm.weight": "Q8_0"})
    with pytest.raises(ModelNotLoadable, match=r"blk\.1\.ffn_norm\.weight is a vector in Q8_0"):
        load(path)
