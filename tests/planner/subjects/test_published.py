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
    "gemma-3-27b-it": 27.0,
    "DeepSeek-V2-Lite": 15.7,
    "DeepSeek-V3": 671.0,
}
TABLE = published_models()


@pytest.mark.parametrize("name", [model.name for model in TABLE.models])
def test_every_entry_can_be_planned_and_says_where_it_was_read(name: str) -> None:
    entry = TABLE.find(name)
    assert entry is not None
    assert entry.source.startswith(("https://", "the defaults of "))
    subject = find_subject(name)
    assert subject.spec.bytes_per_token > 0
    assert TABLE.read_on in subject.source
    assert subject.weights_are_estimated


@pytest.mark.parametrize("name", BYTES_PER_TOKEN)
def test_bytes_per_token_are_those_worked_out_by_hand(name: str) -> None:
    assert find_subject(name).spec.bytes_per_token == BYTES_PER_TOKEN[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_weights_are_about_what_their_makers_state(name: str) -> None:
    subject = find_subject(name)
    assert subject.num_parameters / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    assert subject.own.weights_bytes == 2 * subject.num_parameters


@pytest.mark.parametrize("name", ["qwen3-4b", "QWEN/QWEN3-4B", "Qwen3-4B"])
def test_a_name_is_found_in_any_case_with_or_without_its_organisation(name: str) -> None:
    assert find_subject(name).name == "Qwen/Qwen3-4B"


def test_a_name_that_is_nearly_right_brings_the_right_one() -> None:
    with pytest.raises(ModelNotLoadable, match="did you mean 'Qwen/Qwen3-4B'"):
        find_subject("qwen3-4bb")
    with pytest.raises(ModelNotLoadable, match="there is no folder"):
        find_subject("./nowhere")


def test_names_are_told_apart_by_their_ends() -> None:
    shorts = [model.name.lower().rpartition("/")[2] for model in TABLE.models]
    assert len(set(shorts)) == len(shorts)
