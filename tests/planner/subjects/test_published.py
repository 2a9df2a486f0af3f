"""The bundled table: every entry can be planned, says where it is from, and is right by hand."""

from __future__ import annotations

import pytest

from quire.errors import ModelNotLoadable
from quire.planner.subject import find_subject, published_models

# layers × (elements of keys and values, or of the latent) × bytes of one, by hand.
BYTES_PER_TOKEN = {
    "Llama-3.1-8B": 32 * (8 * 128 + 8 * 128) * 2,  # 131,072
    "Llama-3.3-70B-Instruct": 80 * (8 * 128 + 8 * 128) * 2,
    "Llama-3.2-1B-Instruct": 16 * (8 * 64 + 8 * 64) * 2,
    "Qwen2.5-7B": 28 * (4 * 128 + 4 * 128) * 2,
    "Qwen3-4B": 36 * (8 * 128 + 8 * 128) * 2,  # 147,456
    "Qwen3-30B-A3B": 48 * (4 * 128 + 4 * 128) * 2,
    "Qwen3-Next-80B-A3B-Thinking": 12 * (2 * 256 + 2 * 256) * 2,  # one layer in four
    "Mistral-7B-v0.3": 32 * (8 * 128 + 8 * 128) * 2,
    "gemma-3-27b-it": 62 * (16 * 128 + 16 * 128) * 2,
    "phi-4": 40 * (10 * 128 + 10 * 128) * 2,
    "gpt-oss-120b": 36 * (8 * 64 + 8 * 64) * 2,
    "DeepSeek-V3": 61 * (512 + 64) * 2,  # 70,272
    "DeepSeek-V2-Lite": 27 * (512 + 64) * 2,
    "gpt2": 12 * (12 * 64 + 12 * 64) * 2,
}
# As their makers write it, in billions; the estimate is from shapes alone.
BILLIONS = {
    "Llama-3.1-8B": 8.03,
    "Llama-3.2-1B-Instruct": 1.24,
    "Qwen3-0.6B": 0.6,
    "Qwen3-4B": 4.02,
    "Qwen3-30B-A3B": 30.5,
    "Mixtral-8x7B-v0.1": 46.7,
    "gemma-3-27b-it": 27.4,  # with its tower for images
    "DeepSeek-V2-Lite": 15.7,
    "DeepSeek-V3": 671.0,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "Llama-3.1-405B": 405.9,
    "Qwen3-235B-A22B-Thinking-2507": 235.1,
}
# Of their checkpoints, in gigabytes; others are in 16 bits.
GIGABYTES = {"gpt-oss-20b": 13.8, "gpt-oss-120b": 65.2, "DeepSeek-V3": 673.2}
ACTIVE_BILLIONS = {"gpt-oss-120b": 5.1, "gpt-oss-20b": 3.6, "Qwen3-30B-A3B": 3.0}
TABLE = published_models()


@pytest.mark.parametrize("name", [model.name for model in TABLE.models])
def test_every_entry_can_be_planned_and_says_where_it_was_read(name: str) -> None:
    entry = TABLE.find(name)
    assert entry is not None
    assert entry.source.startswith(("https://", "the model's own config.json, as copied "))
    subject = find_subject(name)
    assert subject.spec.bytes_per_token > 0
    assert entry.read_on in subject.source
    assert subject.weights_are_estimated


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_bytes_per_token_are_those_worked_out_by_hand(name: str) -> None:
    assert find_subject(name).spec.bytes_per_token == BYTES_PER_TOKEN[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_weights_are_about_what_their_makers_state(name: str) -> None:
    subject = find_subject(name)
    assert subject.num_parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    size = GIGABYTES.get(name, 2 * subject.num_parameters / 1e9)
    assert subject.own.weights_bytes / 1e9 == pytest.approx(size, rel=0.005)


@pytest.mark.parametrize("name", ACTIVE_BILLIONS)
def test_weights_of_a_token_are_about_what_their_makers_state(name: str) -> None:
    active = find_subject(name).num_active_parameters / 1e9
    assert active == pytest.approx(ACTIVE_BILLIONS[name], rel=0.02)


def test_a_checkpoint_of_another_precision_is_counted_where_it_is_asked_for() -> None:
    published = find_subject("gpt-oss-120b")
    assert published.precision.name == "MXFP4"
    assert published.bytes_by_precision["bfloat16"] == 2 * published.num_parameters
    whole = find_subject("gpt-oss-120b", weights="bfloat16")
    assert whole.own.weights_bytes == 2 * whole.num_parameters
    eight = find_subject("Llama-3.1-8B", weights="fp8")
    tables = 2 * eight.parameters.table
    assert eight.own.weights_bytes == pytest.approx(eight.num_parameters + tables, rel=1e-3)
    assert eight.spec == find_subject("Llama-3.1-8B").spec  # keys and values are as they were


@pytest.mark.parametrize("name", ["qwen3-4b", "QWEN/QWEN3-4B", "Qwen3-4B"])
def test_a_name_is_found_in_any_case_with_or_without_its_organisation(name: str) -> None:
    assert find_subject(name).name == "Qwen/Qwen3-4B"


def test_a_name_that_is_nearly_right_brings_the_right_one() -> None:
    with pytest.raises(ModelNotLoadable, match="did you mean 'Qwen/Qwen3-4B'"):
        find_subject("qwen3-4bb")
    with pytest.raises(ModelNotLoadable, match="there is no folder"):
        find_subject("./nowhere")


def test_the_beginning_of_a_name_is_enough_where_it_is_of_one_model() -> None:
    assert find_subject("qwen3-next-80b-a3b").name == "Qwen/Qwen3-Next-80B-A3B-Thinking"
    assert find_subject("qwen3-30b-a3b").name == "Qwen/Qwen3-30B-A3B"  # and not what goes on
    with pytest.raises(ModelNotLoadable, match=r"several begin so: openai/gpt-oss-120b, openai/gp"):
        find_subject("gpt-oss")


def test_names_are_told_apart_by_their_ends() -> None:
    shorts = [model.name.lower().rpartition("/")[2] for model in TABLE.models]
    assert len(set(shorts)) == len(shorts)
