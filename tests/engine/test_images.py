"""Images in prompts: generate()'s own tokens, whatever is cut, shared or interrupted."""

import asyncio
import base64
import io
import json
from dataclasses import replace
from functools import cache as once
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen2VLImageProcessorPil,
)

from engine.test_offloading import offload, until
from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.engine.runner import ModelRunner
from quire.errors import RequestError, UnsupportedModel
from quire.kv.prefix_index import PrefixKeys
from quire.models.executors.image_features import ImageEncoder
from quire.models.loader import adopt, auto_class, load
from quire.models.vision import Vision, named
from seers import SEERS, picture, seer, word_tokenizer
from tiny import tiny_model
from zoo.sight import tiny_seer

NEW = 8
GREEDY = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(
    kv_cache_memory_bytes="8MB", max_model_len=128, block_size=4, max_num_batched_tokens=5
)
RUN = sorted(SEERS.keys() - {"paligemma"})
SOME = ("llava", "gemma3", "qwen3_vl")  # one axis; images whole; three axes, and deeper features


def llm_of(name: str, **options: Any) -> LLM:
    model, processor = seer(name)
    return LLM(model, tokenizer=processor, **{**OPTIONS, **options})


def shown(name: str, text: str, *images: Any) -> dict[str, Any]:
    """A prompt; ``@`` stands for an image."""
    placeholder = seer(name)[1].image_token
    text = text.replace("@", placeholder)
    return {"prompt": text, "multi_modal_data": {"image": [*images]}}


def prompts(name: str) -> list[dict[str, Any]]:
    """One image, another one in its place, and two of which one is the first."""
    return [
        shown(name, "w1 w2 @ w3", picture(1)),
        shown(name, "w1 w2 @ w3", picture(2)),
        shown(name, "@ w5 w6 @ w9 w10", picture(1), picture(3, 56, 84)),
    ]


def own(name: str, prompt: dict[str, Any], num_new: int = NEW) -> list[int]:
    """What Transformers' generate() says after a prompt."""
    model, processor = seer(name)
    images = prompt["multi_modal_data"]["image"]
    made = processor(text=[prompt["prompt"]], images=[images], return_tensors="pt")
    taken = signature(model.forward).parameters
    given = {key: each for key, each in made.items() if key in taken}
    out = model.generate(**given, max_new_tokens=num_new, do_sample=False)
    tokens: list[int] = out[0, made["input_ids"].shape[1] :].tolist()
    return tokens


@once
def expected(name: str) -> list[list[int]]:
    return [own(name, prompt) for prompt in prompts(name)]


def texts(llm: LLM, several: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(done.choices[0].token_ids) for done in llm.generate(several, params)]


def encoder_of(llm: LLM) -> ImageEncoder:
    runner = llm.engine._runner
    assert isinstance(runner, ModelRunner)
    assert runner.encoder is not None
    return runner.encoder


# -- the same tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUN)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    """In chunks of five tokens, which cut images, together; and found in the cache, apart."""
    assert len({tuple(text) for text in expected(name)}) > 1  # else nothing below would be seen
    with llm_of(name) as llm:
        assert texts(llm, prompts(name)) == expected(name)
        for prompt, text in zip(prompts(name), expected(name), strict=True):
            [done] = llm.generate(prompt, GREEDY)
            assert list(done.choices[0].token_ids) == text
            assert done.num_cached_tokens > len(done.prompt_token_ids) // 2


def test_each_picture_is_encoded_once() -> None:
    with llm_of("qwen3_vl", max_num_batched_tokens=64) as llm:
        assert texts(llm, prompts("qwen3_vl")) == expected("qwen3_vl")
        assert encoder_of(llm).num_encoded == 2 + 3  # the trial's, and those of three pictures


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cache", ["contiguous", "growing", "virtual"])
@pytest.mark.parametrize("name", SOME)
def test_every_strategy_holds_them(name: str, cache: str) -> None:
    with llm_of(name, cache=cache) as llm:
        assert texts(llm, prompts(name)) == expected(name)


@pytest.mark.parametrize("name", SOME)
def test_continuations_share_an_image(name: str) -> None:
    prompt = prompts(name)[0]
    with llm_of(name) as llm:
        params = SamplingParams(n=4, max_tokens=NEW, temperature=0, ignore_eos=True)
        [done] = llm.generate(prompt, params)
        assert [list(choice.token_ids) for choice in done.choices] == [expected(name)[0]] * 4
        [found] = llm.beam_search(prompt, BeamSearchParams(beam_width=1, max_tokens=NEW))
        assert list(found.choices[0].token_ids) == expected(name)[0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("swap_space", [0, "8MB"])
@pytest.mark.parametrize("name", SOME)
def test_a_preempted_sequence_sees_its_image_again(name: str, swap_space: Any) -> None:
    several = prompts(name)
    with llm_of(name, swap_space=swap_space, enable_prefix_caching=False) as llm:
        deliveries: list[Any] = []
        sequences = [
            s for p in several for s in llm.start(llm.request(p, GREEDY), deliveries.append)
        ]
        for count in range(200):
            if not llm.step():
                break
            if count % 3 == 2:
                llm.engine.scheduler.preempt_youngest(spare_oldest=True)
        assert sum(sequence.num_preemptions for sequence in sequences) > 2
        assert [sequence.output_token_ids for sequence in sequences] == expected(name)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_guesses_change_no_token(name: str) -> None:
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with llm_of(name, speculative_config=guesses, max_num_batched_tokens=16) as llm:
        assert texts(llm, prompts(name)) == expected(name)


@pytest.mark.parametrize("name", SOME)
def test_a_placeholder_without_an_image_is_a_token(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A text may spell it: it is computed beside one that has an image, and as by itself."""
    model, processor = seer(name)
    bare = processor.tokenizer(f"w1 {processor.image_token} w3")["input_ids"]
    bare[1] = model.config.image_token_id
    ids = torch.tensor([bare])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
    )
    with llm_of(name, max_num_batched_tokens=64) as llm:
        given = texts(llm, [prompts(name)[0], bare, prompts(name)[2]])
    assert given == [expected(name)[0], out[0, len(bare) :].tolist(), expected(name)[2]]
    assert "a step failed" not in caplog.text  # after which each would have been computed alone


def test_features_are_kept_up_to_a_bound() -> None:
    with llm_of("llava_next", enable_prefix_caching=False) as llm:
        encoder = encoder_of(llm)
        prompt = shown("llava_next", "w1 @", picture(1))
        [done] = llm.generate(prompt, GREEDY)
        assert encoder.num_encoded == 3  # the trial's, and this one for all of its chunks
        size = len(done.prompt_token_ids) - 1
        assert encoder.kept_bytes == size * 64 * 4  # the bound: above that of five tokens
        texts(llm, [prompt])
        assert encoder.num_encoded == 3
        texts(llm, [shown("llava_next", "w1 @", picture(2)), prompt])
        assert encoder.num_encoded > 4
        assert encoder.kept_bytes == size * 64 * 4


def test_features_are_kept_for_their_owner_alone() -> None:
    """Or the time of a first token would tell what another one has shown."""
    with llm_of("llava", enable_prefix_caching=False) as llm:
        encoder, prompt = encoder_of(llm), shown("llava", "w1 @", picture(1))
        encoded = [encoder.num_encoded]
        for tenant in ("ann", "ann", "bob"):
            llm._completions([llm.request(prompt, GREEDY, keys=PrefixKeys(tenant=tenant))], None)
            encoded.append(encoder.num_encoded)
    assert [each - encoded[0] for each in encoded] == [0, 1, 1, 2]


@pytest.mark.parametrize("name", ["llava", "gemma3"])
def test_a_budget_below_an_image_is_enough(name: str) -> None:
    with llm_of(name, max_num_batched_tokens=2) as llm:
        assert texts(llm, prompts(name)) == expected(name)


def test_an_image_whose_tokens_attend_to_each_other_is_in_one_chunk() -> None:
    with llm_of("gemma3", max_num_batched_tokens=7) as llm:
        assert llm.engine.scheduler.limits.whole_images
        chunks: list[tuple[int, int, int]] = []
        llm.engine.watch = lambda plan: chunks.extend(
            (chunk.sequence.seq_id, chunk.start, chunk.stop) for chunk in plan.chunks
        )
        done = llm.generate(prompts("gemma3"), GREEDY)
        requests = [llm.request(prompt) for prompt in prompts("gemma3")]
    assert len(chunks) > len(done)
    for seq_id, _, stop in chunks:
        for image in requests[seq_id].keys.images:
            assert not image.start < stop < image.start + image.num_tokens


def test_a_folder_brings_its_processor(tmp_path: Path) -> None:
    for part in seer("llava"):
        part.save_pretrained(tmp_path)
    with LLM(tmp_path, **OPTIONS) as llm:
        assert texts(llm, prompts("llava")) == expected("llava")


TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %} {{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %} <image>{% else %} {{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def test_a_chat_shows_images(llava: LLM) -> None:
    """Pictures in memory and data: URLs, in one conversation and in several at once."""
    made = io.BytesIO()
    Image.fromarray(picture(2)).save(made, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(made.getvalue()).decode()}"
    several = [
        {"type": "image_pil", "image_pil": picture(1)},
        {"type": "text", "text": "w3"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    messages = [{"role": "system", "content": "w1"}, {"role": "user", "content": several}]
    said = own("llava", shown("llava", "w1 @ w3 @", picture(1), picture(2)))
    text = [{"role": "user", "content": "w1 w2"}]
    [first, second] = llava.chat([messages, text], GREEDY, chat_template=TEMPLATE)
    assert list(first.choices[0].token_ids) == said
    assert len(second.prompt_token_ids) == 2
    [again] = llava.chat(messages, GREEDY, chat_template=TEMPLATE)
    assert list(again.choices[0].token_ids) == said


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image_pil", "image_pil": 3}, "not int"),
        ({"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}, "give it as data"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "be read"),
        ({"type": "text", "text": "<image>"}, None),
    ],
)
def test_what_a_chat_cannot_show(llava: LLM, part: Any, reason: str | None) -> None:
    messages = [{"role": "user", "content": [part]}]
    if reason is None:  # a placeholder without an image is a token
        assert llava.chat(messages, GREEDY, chat_template=TEMPLATE)
        return
    with pytest.raises(RequestError, match=reason):
        llava.chat(messages, GREEDY, chat_template=TEMPLATE)


def test_a_prompt_has_as_many_images_as_it_may() -> None:
    with llm_of("llava", limit_mm_per_prompt={"image": 1}) as llm:
        assert llm.request(shown("llava", "@", picture(1)))
        with pytest.raises(RequestError, match=r"has 2 images, and may have 1 \(limit_mm_per_prom"):
            llm.request(shown("llava", "@ @", picture(1), picture(2)))
    with (
        llm_of("llava", limit_mm_per_prompt={"image": 0}) as llm,
        pytest.raises(RequestError, match="takes no images: limit_mm_per_prompt has none"),
    ):
        llm.request(shown("llava", "@", picture(1)))


def test_a_checkpoint_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    """Where its config has a class for text alone besides."""
    model, processor = tiny_seer("qwen3_5")
    model.save_pretrained(tmp_path)
    processor.tokenizer.save_pretrained(tmp_path)
    assert auto_class(model.config) is AutoModelForImageTextToText
    loaded = load(tmp_path)
    assert type(loaded.model) is type(model)
    assert named(
        Vision.of(replace(loaded, processor=processor), {"image": 64}).read("<image>", [picture(1)])
    )
    model.config.architectures = ["Qwen3_5ForCausalLM"]
    assert auto_class(model.config) is AutoModelForCausalLM
    model.config.architectures = None
    assert auto_class(model.config) is AutoModelForCausalLM


def test_a_model_may_project_hidden_states_itself(caplog: pytest.LogCaptureFixture) -> None:
    """As Llama 4 does, whose encoder pools nothing: not a placeholder without an image, though."""
    model, processor = tiny_seer("llama4")
    placeholder = processor.image_token
    bare = processor.tokenizer(f"w1 {placeholder} w3")["input_ids"]
    ids = torch.tensor([bare])
    out = model.generate(ids, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    made = processor(text=[f"w1 {placeholder} w3"], images=[[picture(1)]])
    given = {name: made[name] for name in ("input_ids", "pixel_values")}
    seen = model.generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    prompt = {"prompt": f"w1 {placeholder} w3", "multi_modal_data": {"image": picture(1)}}
    with LLM(model, tokenizer=processor, **{**OPTIONS, "max_num_batched_tokens": 64}) as llm:
        said = texts(llm, [prompt, bare])
    assert said == [seen[0, 3:].tolist(), out[0, 3:].tolist()]
    assert "a step failed" not in caplog.text


# -- the prefix cache ------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("before", ["w1 w2 w3 w4", "w1 w2"])
@pytest.mark.parametrize("name", SOME)
def test_another_picture_of_the_same_size_is_never_found(name: str, before: str) -> None:
    """Its placeholders are the same tokens, where it begins a block and in the middle of one."""
    first, second = (shown(name, f"{before} @ w5", picture(seed)) for seed in (1, 2))
    expected_of_second = own(name, second)  # which may leave marks on the model
    with llm_of(name) as llm:
        [a], [b] = llm.generate(first, GREEDY), llm.generate(second, GREEDY)
        assert a.prompt_token_ids == b.prompt_token_ids
        assert b.num_cached_tokens <= len(before.split())  # the text before it
        assert list(b.choices[0].token_ids) == expected_of_second
        [again] = llm.generate(first, GREEDY)
        assert again.num_cached_tokens > len(before.split())
        assert again.choices[0].token_ids == a.choices[0].token_ids


def test_a_picture_has_one_name_in_every_prompt() -> None:
    model, processor = seer("llava_next")
    vision = Vision.of(adopt(model, processor), {"image": 64})
    placeholder = processor.image_token
    alone = vision.read(placeholder, [picture(1)])
    both = vision.read(f"w1 {placeholder} w2 {placeholder}", [picture(2), picture(1)])
    assert alone.images[0].content_id == both.images[1].content_id
    assert alone.images[0].content_id != both.images[0].content_id
    first, second = named(both)
    assert first.start == 1
    assert second.start == 1 + first.num_tokens + 1
    wide = vision.read(placeholder, [picture(1, 70, 90)])
    assert wide.images[0].content_id != alone.images[0].content_id


def test_blocks_of_an_image_come_back_from_a_tier() -> None:
    first, second = (
        shown("qwen3_vl", "w1 w2 w3 w4 @ w5", picture(seed, 112, 112)) for seed in (1, 2)
    )
    with llm_of("qwen3_vl", kv_tier=("memory:?size=4MiB",), kv_tier_write="always") as llm:
        # A thread of the tier stores, and a request waits only if it expects to gain by it.
        llm.engine.scheduler.costs.note_step = lambda *_: None  # type: ignore[method-assign]
        [before] = llm.generate(first, GREEDY)
        until(lambda: not offload(llm).has_more)
        assert llm.reset_prefix_cache()
        [other] = llm.generate(second, GREEDY)
        until(lambda: not offload(llm).has_more)
        [after] = llm.generate(first, GREEDY)
        assert other.num_cached_tokens == 4
        assert after.num_cached_tokens > 4
        assert after.choices[0].token_ids == before.choices[0].token_ids


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (shown("llava", "w1 w2", picture(1)), "has 0 × '<image>', and 1 images"),
        (shown("llava", "@ @", picture(1)), "has 2 × '<image>', and 1 images"),
        (
            shown("llava", "@", picture(1)[..., 0]),
            r"u8\[height, width, 3\]; this is uint8\[90, 70\]",
        ),
        (shown("llava", "@", np.zeros((0, 4, 3), np.uint8)), "this is uint8"),
        (shown("llava", "@", picture(1).astype(np.float32)), "this is float32"),
        (shown("llava", "@", "cat.png"), "not str"),
        ({"prompt": "w1", "multi_modal_data": {"depth": []}}, "'image' and 'video', one or a list"),
        ({"prompt": "w1", "multi_modal_data": [picture(1)]}, "this one: list"),
        ({"multi_modal_data": {"image": picture(1)}}, "this one has"),
        ({"prompt": "w1", "image": picture(1)}, r"this one has \['image', 'prompt'\]"),
        ({"prompt_token_ids": [4], "multi_modal_data": {"image": picture(1)}}, "not token ids"),
    ],
)
def test_what_cannot_be_shown_is_refused(llava: LLM, prompt: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        llava.request(prompt)


@pytest.fixture(scope="module")
def llava() -> Any:
    with llm_of("llava") as llm:
        yield llm


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "I;16"])
def test_a_picture_of_any_mode_is_made_of_colours(llava: LLM, mode: str) -> None:
    request = llava.request(shown("llava", "@", Image.new(mode, (40, 30))))
    assert len(request.prompt_token_ids) == 4


def test_a_prompt_without_pictures_may_have_their_form(llava: LLM) -> None:
    for data in ({"image": []}, {"image": None}, {}, None):
        request = llava.request({"prompt": "w1 w2", "multi_modal_data": data})
        assert len(request.prompt_token_ids) == 2
    assert llava.request({"prompt_token_ids": [5, 6]}).prompt_token_ids == (5, 6)


def test_one_image_needs_no_list(llava: LLM) -> None:
    one = {"prompt": "<image>", "multi_modal_data": {"image": picture(1)}}
    assert llava.request(one).keys == llava.request(shown("llava", "@", picture(1))).keys


def test_a_model_of_text_says_why_it_takes_none() -> None:
    with (
        LLM(tiny_model("llama"), **OPTIONS) as llm,
        pytest.raises(RequestError, match="reads text"),
    ):
        llm.request({"prompt": "a", "multi_modal_data": {"image": picture(1)}})


def test_without_a_processor_it_says_so_and_runs_texts() -> None:
    model, processor = seer("llava")
    with LLM(model, tokenizer=processor.tokenizer, **OPTIONS) as llm:
        with pytest.raises(RequestError, match="came without a processor"):
            llm.request(shown("llava", "@", picture(1)))
        assert texts(llm, [[30, 31]])


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_that_wants_torchvision_says_which(tmp_path: Path) -> None:
    """Of a model whose processor reads videos too."""
    model, _ = seer("qwen2_vl")
    for part in (model, word_tokenizer(), Qwen2VLImageProcessorPil()):
        part.save_pretrained(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    said = {**json.loads(file.read_text()), "processor_class": "Qwen2VLProcessor"}
    file.write_text(json.dumps(said))  # as published ones say
    with LLM(tmp_path, **OPTIONS) as llm:
        belongs = r"torchvision that belongs to torch 2\.\d+.* \(0\.\d+\), from where torch came"
        with pytest.raises(RequestError, match=belongs):
            llm.request(shown("qwen2_vl", "@", picture(1)))
        assert texts(llm, [[30, 31]])


def test_a_model_that_reads_backwards_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="attends in both directions"):
        llm_of("paligemma")


def test_a_context_without_room_for_one_says_so() -> None:
    with llm_of("llava_next", max_model_len=16) as llm:
        assert texts(llm, [[30, 31]])
        with pytest.raises(RequestError, match=r"max_model_len is 16"):
            llm.request(shown("llava_next", "@", picture(1)))


def test_a_server_asks_in_another_thread() -> None:
    async def asked() -> list[int]:
        model, processor = seer("llava")
        llm = AsyncLLM(model, tokenizer=processor, **OPTIONS)
        try:
            made = await llm.request(prompts("llava")[0], GREEDY)
            return [t async for delta in llm.generate(made) for t in delta.token_ids]
        finally:
            llm.close()

    assert asyncio.run(asked()) == expected("llava")[0]
