"""The drop-in cache of encoder-decoders: Hugging Face's own answers, and what it then holds."""

from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

from quire.errors import ConfigError, MemoryUnavailable, RequestTooLong, UnsupportedModel
from quire.kv import STRATEGIES
from quire.memory import CheckedMemory, FailingMemory, HostMemory
from quire.models.drop_in import cache
from quire.models.drop_in.encoder_decoder import SourceCache
from quire.spec import ModelSpec
from readers import CONFIGS, features, source_ids, tiny_reader
from tiny import tiny_model

STORED = (*STRATEGIES, "virtual-shared")
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": dict(num_beams=3, num_return_sequences=2),
    "returns-3": dict(do_sample=True, num_return_sequences=3),
}
NEW = dict(max_new_tokens=14, min_new_tokens=14)
OPTIONS: dict[str, Any] = dict(kv_cache_memory_bytes="64MB", block_size=4, growth_tokens=8)

reader = once(tiny_reader)


def make(model: PreTrainedModel, stored: str, **options: Any) -> SourceCache:
    if stored == "virtual-shared":
        stored, options = "virtual", {**options, "shares_pages": True}
    made = cache(model, stored, **{**OPTIONS, **options})
    assert isinstance(made, SourceCache)
    return made


def sources(name: str, *, seed: int = 0) -> dict[str, Tensor]:
    """Two sources; of token ids the second is shorter, and padded."""
    if name == "whisper":
        return {"input_features": features(2, seed=seed)}
    ids, mask = source_ids(2, 11, seed=seed), torch.ones(2, 11, dtype=torch.long)
    mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(name: str, kept: Any, *, seed: int = 0, **mode: Any) -> Tensor:
    torch.manual_seed(1)
    result: Tensor = reader(name).generate(
        **sources(name, seed=seed), past_key_values=kept, **{**NEW, **mode}
    )
    return result


@once
def expected(name: str, mode: str) -> Tensor:
    return generate(name, None, **MODES[mode])


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_texts_tell_sources_apart(name: str) -> None:
    """Else nothing below would be seen."""
    first, second = expected(name, "greedy").tolist()
    assert first != second
    assert min(len(set(first)), len(set(second))) > 2


@pytest.mark.sampled(16)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_the_tokens_are_hugging_faces_own(name: str, mode: str, stored: str) -> None:
    with make(reader(name), stored) as kept:
        assert torch.equal(generate(name, kept, **MODES[mode]), expected(name, mode))
        assert kept.memory.committed_bytes == kept.usage().committed_bytes > 0
    assert kept.memory.committed_bytes == 0


@pytest.mark.parametrize("stored", STORED)
def test_what_it_holds_is_what_the_spec_says(stored: str) -> None:
    model = reader("bart")
    spec = ModelSpec.from_config(model.config.to_dict()).computed_in("float32")
    kept = make(model, stored)
    generate("bart", kept)
    own = EncoderDecoderCache(DynamicCache(), DynamicCache())
    generate("bart", own)
    num_tokens = kept.get_seq_length()
    assert kept.usage().used_bytes == 2 * spec.bytes_for(num_tokens)
    for layer in range(spec.num_layers):
        ours, theirs = (c.cross_attention_cache.layers[layer] for c in (kept, own))
        assert ours.get_seq_length() == theirs.get_seq_length() == 11
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.values, theirs.values)
        assert kept.is_updated[layer]


def test_beams_that_share_blocks_share_their_source() -> None:
    spec = ModelSpec.from_config(reader("bart").config.to_dict()).computed_in("float32")
    kept = make(reader("bart"), "paged")
    generate("bart", kept)  # makes the rows
    kept.batch_repeat_interleave(4)
    usage = kept.usage()
    assert usage.num_sequences == 8
    assert usage.used_bytes == 2 * spec.bytes_for(kept.get_seq_length())
    keys = kept.cross_attention_cache.layers[0].keys
    assert torch.equal(keys[:4], keys[:1].expand(4, -1, -1, -1))
    kept.batch_select_indices(torch.tensor([1, 3]))
    shown = kept.cross_attention_cache.layers[0].keys
    assert torch.equal(shown, keys[[0, 0]])
    assert shown.stride(0) == 0, "one source, seen twice"


@pytest.mark.parametrize("stored", STORED)
def test_rows_take_their_sources_along(stored: str) -> None:
    """Whatever permutes, repeats or picks rows gives each the source that its text belongs to."""
    kept, own = make(reader("bart"), stored), EncoderDecoderCache(DynamicCache(), DynamicCache())
    for each in (kept, own):
        generate("bart", each)
    for change in (
        lambda c: c.reorder_cache(torch.tensor([1, 0])),
        lambda c: c.batch_repeat_interleave(2),
        lambda c: c.reorder_cache(torch.tensor([3, 0, 0, 1])),
        lambda c: c.batch_select_indices(torch.tensor([0, 2, 3])),
        lambda c: c.reorder_cache(torch.tensor([2, 2, 0])),
    ):
        for each in (kept, own):
            change(each)
        for ours, theirs in zip(
            kept.cross_attention_cache.layers, own.cross_attention_cache.layers, strict=True
        ):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)


@pytest.mark.parametrize("stored", STORED)
def test_it_goes_back_as_transformers_does(stored: str) -> None:
    kept, own = make(reader("bart"), stored), EncoderDecoderCache(DynamicCache(), DynamicCache())
    logits = []
    for each in (kept, own):
        text = generate("bart", each)
        each.crop(-5)
        assert each.get_seq_length() == text.shape[1] - 6
        with torch.inference_mode():
            encoded = reader("bart").get_encoder()(**sources("bart"))
            out = reader("bart")(
                encoder_outputs=encoded,
                attention_mask=sources("bart")["attention_mask"],
                decoder_input_ids=text[:, -6:-4],
                past_key_values=each,
            )
        logits.append(out.logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", STORED)
def test_it_begins_anew_with_other_sources(stored: str) -> None:
    kept = make(reader("t5"), stored)
    first = generate("t5", kept)
    kept.reset()
    assert not any(kept.is_updated.values())
    assert kept.memory.committed_bytes == 0
    other = generate("t5", kept, seed=5)
    assert torch.equal(other, generate("t5", None, seed=5))
    kept.crop(kept.get_seq_length() * -1)
    assert not kept.is_updated[0], "nothing is left, so the source is read again"
    assert torch.equal(generate("t5", kept), first)


def test_too_long_a_source_is_refused_with_the_option() -> None:
    kept = make(reader("t5"), "paged", max_source_tokens=10)
    with pytest.raises(RequestTooLong, match=r"11 tokens is longer than the 10 .*max_source_token"):
        generate("t5", kept)
    roomy = make(reader("t5"), "paged", max_source_tokens=11)
    assert torch.equal(generate("t5", roomy), expected("t5", "greedy"))
    assert roomy.memory.committed_bytes < make_and_fill("t5").memory.committed_bytes


def make_and_fill(name: str) -> SourceCache:
    kept = make(reader(name), "paged")
    generate(name, kept)
    return kept


def test_room_for_sources_is_for_who_reads_them() -> None:
    with pytest.raises(ConfigError, match="max_source_tokens=9: LlamaForCausalLM reads no source"):
        cache(tiny_model("llama"), max_source_tokens=9)
    with pytest.raises(ConfigError, match="max_source_tokens=0 must be at least 1"):
        cache(reader("t5"), max_source_tokens=0)


def test_pages_that_are_refused_leave_an_empty_cache() -> None:
    """Half of the layers had their source then; none may be read as if it were there."""
    failed = 0
    for fail_at in range(1, 12):
        kept = make(
            reader("bart"), "growing", provider=FailingMemory(HostMemory(), failing={fail_at})
        )
        try:
            generate("bart", kept)
        except MemoryUnavailable:
            failed += 1
            assert not any(kept.is_updated.values())
            assert torch.equal(generate("bart", kept), expected("bart", "greedy"))
    assert failed


def test_every_page_lies_within_its_region() -> None:
    provider = CheckedMemory(HostMemory())
    kept = make(reader("whisper"), "virtual", provider=provider)
    generate("whisper", kept)
    kept.close()
    assert not kept.memory.committed_bytes


def test_other_heads_than_the_file_says_are_refused() -> None:
    kept = make(reader("bart"), "paged")
    generate("bart", kept)
    with pytest.raises(UnsupportedModel, match="layer 1 caches sources of"):
        kept.cross_attention_cache.update(torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5), 1)


def test_a_decoder_may_have_more_layers_than_its_encoder() -> None:
    """Transformers makes a T5's own cache as deep as the encoder, and then finds no layer."""
    config = CONFIGS["t5"]()
    config.num_layers, config.num_decoder_layers = 1, 3
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config).eval()
    want = model.generate(
        **sources("t5"), past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()), **NEW
    )
    with make(model, "paged") as kept:
        assert torch.equal(model.generate(**sources("t5"), past_key_values=kept, **NEW), want)
        assert len(kept) == 3
    assert config.num_layers == 1, "the model's own config stays as it was"
