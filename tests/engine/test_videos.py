"""Videos in prompts: generate()'s own tokens, and names that the frames and their times have."""

from collections.abc import Iterator
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import VoxtralConfig

from quire import LLM, SamplingParams
from quire.errors import RequestError, UnsupportedModel
from quire.models.loader import adopt, auto_class
from quire.models.vision import Vision
from seers import picture
from tiny import tiny_model
from zoo.sight import tiny_seer

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(
    kv_cache_memory_bytes="8MB", max_model_len=128, block_size=4, max_num_batched_tokens=5
)


def frames(seed: int, number: int = 4) -> Any:
    return np.stack([picture(100 * seed + frame, 40, 40) for frame in range(number)])


def shown(text: str, **data: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": data}


@pytest.fixture(scope="module")
def seer() -> Any:
    return tiny_seer("qwen2_5_vl")


@pytest.fixture(scope="module")
def llm(seer: Any) -> Iterator[LLM]:
    model, processor = seer
    with LLM(model, tokenizer=processor, **OPTIONS) as made:
        yield made


def own(seer: Any, text: str, **given: Any) -> list[int]:
    """What generate() says."""
    model, processor = seer
    made = processor(text=[text], **given)
    taken = signature(model.forward).parameters
    of_model = {name: each for name, each in made.items() if name in taken}
    ids = made["input_ids"]
    out = model.generate(
        **of_model, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )
    tokens: list[int] = out[0, ids.shape[1] :].tolist()
    return tokens


def test_a_video_beside_an_image(seer: Any, llm: LLM) -> None:
    """In chunks of five tokens, in either order, with times; then found in the prefix cache."""
    slow = {"fps": 0.5}
    prompts = [
        shown("w1 <video> w2 <image> w3", video=frames(1), image=picture(1)),
        shown("w1 <image> w2 <video> w3", video=[frames(1)], image=[picture(1)]),
        shown("w1 <video> w2 <video> w3", video=[(frames(1), slow), frames(2, 3)]),
    ]
    expected = [
        own(seer, prompts[0]["prompt"], images=[[picture(1)]], videos=[frames(1)]),
        own(seer, prompts[1]["prompt"], images=[[picture(1)]], videos=[frames(1)]),
        own(
            seer,
            prompts[2]["prompt"],
            videos=[frames(1), frames(2, 3)],
            video_metadata=[slow, {}],
        ),
    ]
    assert len({tuple(tokens) for tokens in expected}) == 3
    for _ in range(2):
        done = llm.generate(prompts, GREEDY)
        assert [list(each.choices[0].token_ids) for each in done] == expected
    assert all(each.num_cached_tokens >= 8 for each in done)


def test_a_video_is_its_frames_and_their_times(seer: Any, llm: LLM) -> None:
    def name(video: Any) -> str:
        keys = llm.request(shown("w1 <video>", video=video)).keys
        [only] = keys.images
        assert (only.start, only.num_tokens) == (1, 8)
        return only.content_id

    several = [Image.fromarray(frame) for frame in frames(1)]
    same = {name(frames(1)), name([frames(1)]), name(several), name([several])}
    assert same == {name((frames(1), {})), name(torch.from_numpy(frames(1)))}
    assert len(same) == 1
    assert (
        len(same | {name(frames(2)), name(frames(1)[::-1]), name((frames(1), {"fps": 2.0}))}) == 4
    )


def test_another_video_of_the_same_size_is_never_found(llm: LLM) -> None:
    first, second = (shown("w1 w2 w3 w4 <video> w5", video=frames(seed)) for seed in (5, 6))
    [a], [b], [again] = (llm.generate(each, GREEDY) for each in (first, second, first))
    assert a.prompt_token_ids == b.prompt_token_ids
    assert b.num_cached_tokens <= 4 < again.num_cached_tokens
    assert again.choices[0].token_ids == a.choices[0].token_ids


def test_frames_may_be_read_as_images() -> None:
    """SmolVLM has no encoder for videos: its processor makes images of the frames."""
    model, processor = tiny_seer("smolvlm")
    vision = Vision.of(adopt(model, processor), {"image": 4, "video": 1})
    [read] = vision.read("w1 <video>", [], [frames(1)]).images
    assert (read.modality, read.num_tokens) == ("image", 4)


def test_placeholders_of_images_for_a_videos_own_encoder(seer: Any) -> None:
    """As GLM-4V's processor writes them: whose features they take could not be told."""
    model, processor = seer
    vision = Vision.of(adopt(model, processor), {"image": 4, "video": 1})
    kinds = {
        "image": replace(vision.of_kind("image"), token_id=vision.of_kind("video").token_id),
        "video": replace(vision.of_kind("video"), token_id=198),
    }
    with pytest.raises(RequestError, match="makes of a video what no encoder"):
        replace(vision, kinds=kinds).read("<video>", [], [frames(1)])


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (shown("w1", video=frames(1)), "has 0 × '<video>', and 1 videos"),
        (shown("<video>", video=[frames(1), frames(2)]), "has 1 × '<video>', and 2 videos"),
        (shown("<video>", video=frames(1).astype(np.float32)), r"this is float32\[4, 40, 40, 3\]"),
        (shown("<video>", video=[[picture(1), picture(1, 20, 20)]]), "frames of several sizes"),
        (shown("<video>", video=[[]]), "a list of images or an array"),
        (shown("<video>", video="cat.mp4"), "not str"),
        (shown("<video>", video=(frames(1), {"speed": 2})), r"not \['speed'\]"),
        (shown("<video>" * 9, video=[frames(1)] * 9), "has 9 videos, and may have 8"),
        (shown("<audio>", audio=(np.zeros(4), 16000)), "no model is given recordings"),
        ({"prompt_token_ids": [4], "multi_modal_data": {"video": frames(1)}}, "not token ids"),
    ],
)
def test_what_cannot_be_shown_is_refused(llm: LLM, prompt: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        llm.request(prompt)


def test_a_decoder_that_hears_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="voxtral: this model hears, and Transformers has"):
        auto_class(VoxtralConfig())


def test_a_model_says_why_it_takes_none(seer: Any) -> None:
    model, processor = seer
    with (
        LLM(model, tokenizer=processor, limit_mm_per_prompt={"video": 0}, **OPTIONS) as llm,
        pytest.raises(RequestError, match="takes no videos: limit_mm_per_prompt has none"),
    ):
        llm.request(shown("<video>", video=frames(1)))
    model, processor = tiny_seer("llava")
    with (
        LLM(model, tokenizer=processor, **OPTIONS) as llm,
        pytest.raises(RequestError, match="takes no videos: its StandIn reads none"),
    ):
        llm.request(shown("<video>", video=frames(1)))
    with (
        LLM(tiny_model("llama"), **OPTIONS) as llm,
        pytest.raises(RequestError, match="takes no images: it reads text"),
    ):
        llm.request({"prompt": "a", "multi_modal_data": {"video": frames(1)}})
