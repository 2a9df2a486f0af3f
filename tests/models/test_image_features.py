"""Features of images: what a step holds of them."""

import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from quire.models.executors.image_features import ImageEncoder, PromptImage, PromptImages

ROWS, WIDTH, BEFORE, MANY = 50, 7, 3, 8


def num_alive() -> int:
    """Count the images all of whose rows are in memory, if only some can be reached."""
    found = set()
    for each in gc.get_objects():
        if type(each) is torch.Tensor and each.ndim == 2 and each.shape[1] == WIDTH:
            storage = each.untyped_storage()
            if storage.nbytes() == ROWS * WIDTH * 4:
                found.add(storage.data_ptr())
    return len(found)


class Seeing(nn.Module):
    """Makes features of an image's number, and counts those of others that are in memory."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.most_alive = 0

    @property
    def base_model(self) -> "Seeing":
        return self

    def get_image_features(self, pixel_values: torch.Tensor, **_: Any) -> Any:
        self.most_alive = max(self.most_alive, num_alive())
        rows = torch.arange(ROWS)[:, None] + 1000 * pixel_values.sum() + torch.zeros(WIDTH)
        return SimpleNamespace(pooler_output=rows)


def prompt(number: int) -> PromptImages:
    image = PromptImage(
        content_id=str(number),
        inputs={"pixel_values": torch.tensor([[float(number)]])},
        num_tokens=ROWS,
    )
    return PromptImages(
        images=(image,),
        token_ids=(1,) * BEFORE + (9,) * ROWS,
        places=np.arange(BEFORE, BEFORE + ROWS),
        token_types={},
    )


def test_a_step_keeps_no_more_of_an_image_than_it_takes() -> None:
    """Many prompts whose last tokens of an image are computed again, beyond what is kept."""
    model = Seeing()
    encoder = ImageEncoder(model, {"image": 9}, ROWS * WIDTH * 4)
    stop = BEFORE + ROWS
    prompts = [prompt(number) for number in range(MANY)]
    ids = torch.full((2 * len(prompts),), 9)
    step = encoder.of_step([(stop - 2, stop)] * len(prompts), prompts, ids, torch.arange(len(ids)))
    assert step is not None
    rows = step.of_step()["mm_encoder_outputs"]["image"].pooler_output
    expected = [1000 * number + row for number in range(MANY) for row in (ROWS - 2, ROWS - 1)]
    assert rows[:, 0].tolist() == expected
    assert model.most_alive <= 2, model.most_alive
    assert encoder.kept_bytes == ROWS * WIDTH * 4
