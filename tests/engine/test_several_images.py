"""Several images in a prompt, and what a model reads beside their features."""

from typing import Any

import pytest
import torch

from engine.test_videos import GREEDY, OPTIONS, own, shown
from quire import LLM
from quire.errors import RequestError, UnsupportedModel
from quire.models.executors.choice import Trial
from quire.models.loader import adopt
from seers import picture
from tiny import tiny_model
from zoo.sight import tiny_seer


def test_a_model_whose_images_see_each_other_takes_one() -> None:
    """Molmo 2: a token of an image attends to those of all images, also to later ones."""
    model, processor = tiny_seer("molmo2")
    with LLM(model, tokenizer=processor, **OPTIONS) as llm:
        [done] = llm.generate(shown("w1 w2 <image> w3", image=picture(1)), GREEDY)
        expected = own((model, processor), "w1 w2 <image> w3", images=[[picture(1)]])
        assert list(done.choices[0].token_ids) == expected
        with pytest.raises(
            RequestError, match=r"has 2 images, and may have 1 \(with two, .*logits"
        ):
            llm.request(shown("<image> w1 <image>", image=[picture(1), picture(2)]))


def test_tokens_go_to_experts_of_their_kind() -> None:
    """ERNIE 4.5: its processor says of each token whether experts of pictures have it."""
    seer = model, processor = tiny_seer("ernie4_5_vl_moe")
    texts = ["w1 w2 <image> w3 w4", "<image> w5 w6 <image> w9"]
    images = [[picture(1)], [picture(2), picture(3)]]
    expected = [
        own(seer, text, images=[several]) for text, several in zip(texts, images, strict=True)
    ]
    with LLM(model, tokenizer=processor, **OPTIONS) as llm:
        alone = llm.generate([[7, 8, 9]], GREEDY)[0].choices[0].token_ids
        prompts: list[Any] = [
            shown(text, image=several) for text, several in zip(texts, images, strict=True)
        ]
        said = [
            list(each.choices[0].token_ids) for each in llm.generate([*prompts, [7, 8, 9]], GREEDY)
        ]
    assert said == [*expected, list(alone)]


def test_a_trial_sees_past_tokens_that_are_never_given() -> None:
    """Chameleon says the least number of some: beside it every difference would be small."""
    trial = Trial(adopt(tiny_model("llama")), [], torch.float32, 16)
    expected = torch.tensor([[1.0, 2.0, torch.finfo(torch.float32).min]])
    vars(trial)["_expected"] = expected
    trial.judge(expected.clone(), 1)
    for wrong in ([1.0, 2.1, torch.finfo(torch.float32).min], [1.0, 2.0, 0.0]):
        with pytest.raises(UnsupportedModel, match="other logits"):
            trial.judge(torch.tensor([wrong]), 1)
