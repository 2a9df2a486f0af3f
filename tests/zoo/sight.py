"""Classes that see, tiny, and a processor that stands in for each one's own.

A stand-in makes of a picture what the class's encoder takes, by the names of its arguments, and as
many placeholders as the encoder makes features. What published processors do besides (sizes, marks
around an image, tiles) is not judged here.
"""

import re
from collections.abc import Callable, Mapping
from inspect import signature
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from seers import token_id, word_tokenizer
from zoo.build import with_random_weights
from zoo.sizes import tiny_sizes

SIDE, PATCH = 28, 14
_Sizes = dict[str, Any]
# Of sections that see; those of text are zoo.sizes'.
SIGHT: _Sizes = dict(
    image_size=SIDE,
    patch_size=PATCH,
    num_channels=3,
    depth=2,
    embed_dim=64,
    out_hidden_size=64,
    output_dim=64,
    mlp_ratio=2,
    spatial_merge_size=2,
    temporal_patch_size=2,
    window_size=56,
    fullatt_block_indexes=[1],
    deepstack_visual_indexes=[0, 1],
    num_position_embeddings=16,
    projection_dim=64,
    vision_output_dim=64,
    projector_hidden_size=64,
    projector_input_dim=64,
    projector_output_dim=64,
    encoder_hidden_size=64,
    num_query_tokens=4,
    mm_tokens_per_image=4,
    image_seq_length=4,
    vision_feature_layer=-1,
    cross_attention_hidden_size=64,
)
# What single classes need besides; a section's in a mapping.
_TILES: _Sizes = dict(image_grid_pinpoints=[[SIDE, SIDE]])
_OMNI: _Sizes = dict(vision_start_token_id=token_id("<boi>"), vision_end_token_id=token_id("<eoi>"))
_SMALL_AXES: _Sizes = dict(rope_parameters={"mrope_section": [1, 1, 2]})
_MERGED: _Sizes = dict(out_hidden_size=256)  # four patches beside each other
_AXES: _Sizes = dict(
    text_config=dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3])
    )
)
_WINDOWS: _Sizes = dict(vision_config=dict(window_size=2))
_OF_GEMMA4: _Sizes = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    patch_size=4,
)
_OTHER_MARKS = ("w90", "w91", "w92")
_MARKS_OF_CODES = {"<|extra_200|>": token_id("<eoi>"), "<image>": token_id("<image>")}
_WORDS_OF_CODES = [token_id(f"w{100 + code}") for code in range(50)]
_SMALL_CODES: _Sizes = dict(
    num_embeddings=50, codebook_size=50, embed_dim=4, latent_channels=4, base_channels=32
)
OWN: dict[str, _Sizes] = {
    **{key: dict(insert_layer_id=0) for key in ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr")},
    "chameleon": dict(
        vocabulary_map=_MARKS_OF_CODES
        | {
            f"IMGIMG{'ABCDEFGHIJ'[code // 10]}{'ABCDEFGHIJ'[code % 10]}Z": word
            for code, word in enumerate(_WORDS_OF_CODES)
        },
        vq_config=dict(_SMALL_CODES, resolution=SIDE, channel_multiplier=[1, 1, 1]),
    ),
    "emu3": dict(
        vocabulary_map=_MARKS_OF_CODES
        | {f"<|visual token {code:06}|>": word for code, word in enumerate(_WORDS_OF_CODES)},
        vq_config=dict(
            _SMALL_CODES, channel_multiplier=[1, 1, 1], num_res_blocks=1, hidden_size=32
        ),
    ),
    "deepseek_vl_hybrid": dict(high_res_vision_config=dict(window_size=2)),
    "got_ocr2": _WINDOWS,
    "pp_chart2table": _WINDOWS,
    "aria": dict(projector_patch_to_query_dict={4: 4}),
    "exaone4_5": dict(text_config=dict(model_type="exaone4")),
    "glm4v_moe": dict(text_config=_SMALL_AXES),
    "granite4_vision": dict(
        _TILES,
        downsample_rate="1/2",
        deepstack_layer_map=[(-1, 0)],
        spatial_target_layers=[1, 1, 2, 2],
    ),
    "kimi_k25": dict(projection_hidden_size=64),
    "llama4": dict(
        vision_config=dict(intermediate_size=256, projector_input_dim=64, vision_output_dim=64)
    ),
    "hunyuan_vl": _AXES,
    "qwen3_vl_moe": dict(text_config=dict(sliding_window=None)),
    "inkling2": dict(vision_config=dict(text_hidden_size=64, projection_hidden_dim=64)),
    "inkling_mm_model": dict(vision_config=dict(text_hidden_size=64)),
    "glm5_next": dict(
        text_config=dict(num_key_value_heads=4, index_topk=16, qk_rope_head_dim=0, head_dim=None)
    ),
    "granite_docling": dict(vision_config=dict(image_size=8 * PATCH)),
    "deepseek_ocr2": dict(
        text_config=dict(mlp_layer_types=["dense", "sparse"] * 2),
        vision_config=dict(sam_config=dict(downsample_channels=[64, 64])),
    ),
    "dots3_note": dict(
        vision_config=dict(adapter_in_dim=64, adapter_out_dim=64),
        audio_config=dict(adapter_input_size=64, adapter_out_dim=64),
    ),
    **{key: dict(vision_config=_OF_GEMMA4) for key in ("gemma4", "gemma4_unified")},
    "ernie4_5_vl_moe": dict(
        text_config=dict(
            rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[3, 3, 2])
        )
    ),
    "gemma3n": dict(text_config=dict(intermediate_size=96)),
    "nemotron_h_omni": dict(vit_hidden_size=64, vision_config=dict(video_temporal_patch_size=2)),
    "molmo2": dict(
        image_token_id=token_id("<image>"),
        vision_config=dict(num_position_embeddings=4),
        adapter_config=dict(text_hidden_size=64),
    ),
    "ovis2": dict(
        visual_indicator_token_ids=[token_id(word) for word in ("<boi>", "<eoi>", *_OTHER_MARKS)]
    ),
    "unlimited_ocr": dict(
        text_config=dict(num_key_value_heads=4),
        vision_config=dict(sam_config=dict(downsample_channels=[64, 64])),
    ),
    "mistral_large4": dict(text_config=dict(num_key_value_heads=4, head_dim=None)),
    "muse_glimmer": _MERGED,
    "muse_spark": _MERGED,
    **dict.fromkeys(("llava_next_video", "llava_onevision"), _TILES),
    **dict.fromkeys(
        ("glm4v", "glm46v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_vl", "qwen2_5_vl"), _AXES
    ),
    "qwen2_5_omni_thinker": {**_OMNI, **_AXES},
    "qwen3_omni_moe_thinker": {**_OMNI, "text_config": dict(sliding_window=None)},
}


def seeing_class(model_type: str) -> type[PreTrainedModel]:
    """What ``AutoModelForImageTextToText`` makes of this ``model_type``."""
    found: type[PreTrainedModel] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[CONFIG_MAPPING[model_type]]
    return found


def tiny_seer(model_type: str) -> tuple[PreTrainedModel, "StandIn"]:
    """A model in float32 with eager attention, and what stands in for its processor.

    Raises: whatever its classes do.
    """
    own = CONFIG_MAPPING[model_type]
    config = own(**_merged(tiny_sizes(own, model_type, SIGHT), OWN.get(model_type, {})))
    _renumber(config)
    model = with_random_weights(seeing_class(model_type), config)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model, StandIn(model)


class StandIn:
    """Writes as many placeholders as the encoder makes features."""

    image_token, video_token = "<image>", "<video>"

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self.tokenizer = model, word_tokenizer()
        self.image_processor = self  # by which the loader knows a processor
        kind = model.config.model_type
        reads_videos = hasattr(model.base_model, "get_video_features") or kind in AS_IMAGES
        self.video_processor = self if reads_videos else None

    def __call__(
        self,
        *,
        text: list[str],
        images: Any = ((),),
        videos: Any = (),
        video_metadata: Any = (),
        **_: Any,
    ) -> dict[str, Tensor]:
        waiting = {
            self.image_token: [inputs_of(self._model, np.asarray(image)) for image in images[0]],
            self.video_token: [inputs_of_video(self._model, np.asarray(video)) for video in videos],
        }
        for alone, metadata in zip_longest(waiting[self.video_token], video_metadata, fillvalue={}):
            alone |= _seconds(self._model, metadata.get("fps", 24))
        together: dict[str, list[Tensor]] = {}
        written = ""
        for part in re.split(f"({self.image_token}|{self.video_token})", text[0]):
            several = waiting.get(part)
            if not several:
                written += part
                continue
            alone = several.pop(0)
            for name, each in alone.items():
                together.setdefault(name, []).append(each)
            placeholders = self._placeholders(part, alone)
            around = ("<boi>", "<eoi>") if self._model.config.model_type == "ovis2" else ("", "")
            written += f" {around[0]} {placeholders} {around[1]} "
        if pooled := together.get("image_token_pooling"):  # patches, counted through all images
            together["image_token_pooling"] = [4 * i + own for i, own in enumerate(pooled)]
        ids = torch.tensor([self.tokenizer(written)["input_ids"]])
        types = (ids == token_id(self.image_token)).long()
        types += 2 * (ids == token_id(self.video_token)).long()
        return {
            "input_ids": ids,
            "mm_token_type_ids": types,
            "token_type_ids": types,
            "moe_mm_token_type_ids": types,
            **{
                name: torch.cat(parts, -1 if "target_sizes" in together and "pixel" in name else 0)
                for name, parts in together.items()
            },
        }

    def _placeholders(self, token: str, alone: dict[str, Tensor]) -> str:
        """As many as features; those of a video's moments apart, where the model counts them so."""
        base = self._model.base_model
        is_video = token == self.video_token and "pixel_values_videos" in alone
        encode = base.get_video_features if is_video else base.get_image_features
        names = signature(encode).parameters
        own = {name: each for name, each in alone.items() if name in names}
        with torch.no_grad():
            made = encode(**own, return_dict=True)
        encoded = made.last_hidden_state if made.pooler_output is None else made.pooler_output
        if encoded is None:  # Granite 4's, which has a feature for each of some layers
            encoded = made.deepstack_features[0][1]
        parts = [encoded] if isinstance(encoded, Tensor) else encoded
        count = sum(part.reshape(-1, part.shape[-1]).shape[0] for part in parts)
        if not is_video:
            return " ".join([self.image_token] * count)
        kind = self._model.config.model_type
        if kind not in _BY_MOMENTS:
            return " ".join([token] * count)
        moments = int(alone["video_grid_thw"][0, 0])
        return " w7 ".join([" ".join([token] * (count // moments))] * moments)


AS_IMAGES = ("smolvlm", "internvl")  # what reads a video's frames as images
# Their positions begin anew with each moment of a video, between which a time is written.
_BY_MOMENTS = (
    *("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "cosmos3_edge", "cosmos3_omni"),
    *("muse_glimmer", "muse_spark", "cohere_compass"),
)


def inputs_of(model: PreTrainedModel, pixels: Any) -> dict[str, Tensor]:
    """What an encoder takes of u8[height, width, 3], cut to its size."""
    taken = signature(model.base_model.get_image_features).parameters
    square = torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 127.5 - 1
    kind = model.config.model_type
    if kind in ("inkling2", "inkling_mm_model", "molmo2", "nemotron_h_omni"):
        return _rows(kind, square)
    if "image_grid_thw" in taken:
        return _patches(model, square)
    side = _side(model)
    if kind in ("lighton_ocr", "mistral3", "mistral_large4"):  # sides are its patches' multiples
        side = 4 * PATCH
    square = torch.nn.functional.interpolate(square[None], (side, side), mode="bilinear")
    if "image_position_ids" in taken:
        return _placed(model, square)
    if "spatial_shapes" in taken:
        return _flat(square)
    if "target_sizes" in taken:
        return _strip(model, square)
    return _whole(model, square, side)


def _whole(model: PreTrainedModel, square: Tensor, side: int) -> dict[str, Tensor]:
    """A picture of one size, f32[1, 3, side, side], as most encoders want it."""
    taken = signature(model.base_model.get_image_features).parameters
    kind = model.config.model_type
    given: dict[str, Tensor] = {"pixel_values": square}
    if kind in ("idefics2", "smolvlm", "granite_docling"):
        given["pixel_values"] = square[None]
    if kind == "granite_docling":
        given["pixel_attention_mask"] = torch.ones(1, 1, dtype=torch.bool)
    if kind in (
        "granite4_vision",
        "llava_next_video",
        "llava_onevision",
    ):  # the whole, and one tile
        given["pixel_values"] = square[None].expand(1, 2, -1, -1, -1).clone()
    if "high_res_pixel_values" in taken:
        sharp = model.config.high_res_vision_config.image_size
        given["high_res_pixel_values"] = torch.nn.functional.interpolate(square, (sharp, sharp))
    if "pixel_mask" in taken:
        given["pixel_mask"] = torch.ones(1, side, side, dtype=torch.bool)
    if "image_sizes" in taken and kind not in ("llava", "vipllava"):
        given["image_sizes"] = torch.tensor([[side, side]])
    return given


def _squares(square: Tensor, side: int) -> dict[str, Tensor]:
    """Four squares of so many pixels, colours last."""
    made = torch.nn.functional.interpolate(square[None], (2 * side, 2 * side))[0]
    cut = made.reshape(3, 2, side, 2, side).permute(1, 3, 2, 4, 0)
    return {"pixel_values": cut.reshape(4, side, side, 3)}


def _rows(kind: str, square: Tensor) -> dict[str, Tensor]:
    """Pixels for each of 2 × 2 patches (4 × 4 for Nemotron), as single classes want them."""
    if kind == "inkling2":
        return _squares(square, 2 * PATCH) | {"image_grid_thw": torch.tensor([[1, 2, 2]])}
    if kind == "inkling_mm_model":  # a patch of two moments
        patches = _squares(square, PATCH)["pixel_values"]
        return {"pixel_values": patches[:, None].expand(-1, 2, -1, -1, -1).clone()}
    side = 4 if kind == "nemotron_h_omni" else 2
    made = torch.nn.functional.interpolate(square[None], (side * PATCH, side * PATCH))
    rows = torch.nn.functional.unfold(made, PATCH, stride=PATCH).transpose(1, 2)
    if kind == "nemotron_h_omni":
        return {"pixel_values": rows[0], "image_grid_hw": torch.tensor([[side, side]])}
    return {
        "pixel_values": rows,
        "image_token_pooling": torch.tensor([[0, 1], [2, 3]]),
        "image_grids": torch.tensor([[1, 1, 1, 1]]),
    }


def _side(model: PreTrainedModel) -> int:
    sight = getattr(model.config, "vision_config", None)
    size = getattr(sight, "image_size", SIDE)
    return int(size[0] if isinstance(size, list | tuple) else size)


def _flat(square: Tensor) -> dict[str, Tensor]:
    """A row of pixels for each patch, as Siglip 2 reads them."""
    side = square.shape[-1] // PATCH
    rows = torch.nn.functional.unfold(square, PATCH, stride=PATCH).transpose(1, 2)
    return {
        "pixel_values": rows,
        "spatial_shapes": torch.tensor([[side, side]]),
        "pixel_attention_mask": torch.ones(1, side * side, dtype=torch.long),
    }


def _placed(model: PreTrainedModel, square: Tensor) -> dict[str, Tensor]:
    """A row of pixels for each patch, colours last, and where it is, as Gemma 4 reads them."""
    sight = model.config.vision_config
    patch, side = sight.patch_size, 2 * sight.pooling_kernel_size
    if model.config.model_type == "gemma4_unified":  # a row for each pooled one
        patch, side = patch * sight.pooling_kernel_size, 2
    made = torch.nn.functional.interpolate(square, (side * patch, side * patch))[0]
    rows = made.reshape(3, side, patch, side, patch).permute(1, 3, 2, 4, 0)
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1)
    return {
        "pixel_values": (rows.reshape(1, side * side, -1) + 1) / 2,
        "image_position_ids": places[None],
    }


def _strip(model: PreTrainedModel, square: Tensor) -> dict[str, Tensor]:
    """All patches beside each other, as MiniCPM reads them: four by four of them."""
    patch = model.config.vision_config.patch_size
    made = torch.nn.functional.interpolate(square, (4 * patch, 4 * patch))
    rows = torch.nn.functional.unfold(made, patch, stride=patch)  # [1, 3 × patch², 16]
    strip = rows.reshape(1, 3, patch, patch, 16).permute(0, 1, 2, 4, 3).reshape(1, 3, patch, -1)
    return {"pixel_values": strip, "target_sizes": torch.tensor([[4, 4]])}


def inputs_of_video(model: PreTrainedModel, frames: Any) -> dict[str, Tensor]:
    """What an encoder takes of u8[frames, height, width, 3], cut to its size."""
    squares = torch.from_numpy(frames.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1
    if model.config.model_type in AS_IMAGES:
        side = _side(model)
        squares = torch.nn.functional.interpolate(squares, (side, side), mode="bilinear")
        own = model.config.model_type == "smolvlm"
        return {"pixel_values": squares[None] if own else squares}
    taken = signature(model.base_model.get_video_features).parameters
    if "target_sizes_videos" in taken:
        strips = [_strip(model, square[None]) for square in squares]
        return {
            "pixel_values_videos": torch.cat([strip["pixel_values"] for strip in strips], -1),
            "target_sizes_videos": torch.cat([strip["target_sizes"] for strip in strips]),
        }
    if "num_frames_per_video" in taken:
        placed = [_placed(model, square[None]) for square in squares]
        return {
            "pixel_values_videos": torch.cat([frame["pixel_values"] for frame in placed]),
            "video_position_ids": torch.cat([frame["image_position_ids"] for frame in placed]),
            "num_frames_per_video": torch.tensor([len(placed)]),
        }
    if model.config.model_type == "ernie4_5_vl_moe" and len(squares) % 2:  # it merges two
        squares = torch.cat([squares, squares[-1:]])
    if "video_grid_thw" not in taken:
        side = _side(model)
        squares = torch.nn.functional.interpolate(squares, (side, side), mode="bilinear")
        return {"pixel_values_videos": squares[None]}
    times = _times(model)
    moments = [_patches(model, *several) for several in squares.split(times)]
    rows = torch.cat([each.pop("pixel_values") for each in moments])
    grid = moments[0].pop("image_grid_thw")
    grid[0, 0] = len(moments)
    found = {"pixel_values_videos": rows, "video_grid_thw": grid}
    if "video_merge_sizes" in taken:
        found["video_merge_sizes"] = moments[0]["image_merge_sizes"]
    return found


def _seconds(model: PreTrainedModel, fps: float) -> dict[str, Tensor]:
    """How long a patch of a video is, where positions depend on it."""
    place = getattr(model.base_model, "get_rope_index", None)
    if place is None or "second_per_grid_ts" not in signature(place).parameters:
        return {}
    return {"second_per_grid_ts": torch.tensor([_times(model) / fps])}


def _times(model: PreTrainedModel) -> int:
    """Frames of a patch."""
    still = model.config.model_type in (*_STILL, "kimi_k25", "paddleocr_vl")
    return 1 if still else getattr(model.config.vision_config, "temporal_patch_size", 2)


def _patches(model: PreTrainedModel, *squares: Tensor) -> dict[str, Tensor]:
    """A row of pixels for each patch, those that are merged behind each other, as Qwen-VL's are.

    Of one picture, or of as many as a patch has frames.
    """
    kind = model.config.model_type
    sight = model.config.vision_config
    patch = sight.patch_size
    merge = getattr(sight, "spatial_merge_size", 2)
    merge = merge if isinstance(merge, int) else 2
    side = 2 * merge
    times = _times(model)
    several = torch.stack([*squares, *squares[-1:] * (times - len(squares))])
    made = torch.nn.functional.interpolate(several, (side * patch, side * patch))
    cut = made.reshape(times, 3, 2, merge, patch, 2, merge, patch)
    rows = cut.permute(2, 5, 3, 6, 1, 0, 4, 7)
    if kind in ("kimi_k25", "paddleocr_vl"):
        pixels = rows.reshape(side * side, 3, patch, patch)
    else:
        pixels = rows.reshape(side * side, -1)
    given = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
    if kind == "video_llama_3":
        given["image_merge_sizes"] = torch.tensor([merge])
    return given


_STILL = (
    "cosmos3_edge",
    "dots3_note",
    "ernie4_5_vl_moe",
    "hunyuan_vl",
    "video_llama_3",
)  # a patch is of one moment


# -- configs ---------------------------------------------------------------------------------------


def _merged(sizes: _Sizes, own: _Sizes) -> _Sizes:
    """Put a class's own sizes over the common ones, section by section; None drops one."""
    found = dict(sizes)
    for name, value in own.items():
        if isinstance(value, Mapping) and isinstance(found.get(name), Mapping):
            found[name] = _merged(dict(found[name]), dict(value))
        elif value is None:
            found.pop(name, None)
        else:
            found[name] = value
    return found


# Marks of a config that must be tokens of a small vocabulary.
_MARKS: tuple[tuple[Callable[[str], bool], str], ...] = (
    (lambda name: name.startswith("image_token"), "<image>"),
    (lambda name: name.startswith("video_token"), "<video>"),
    (lambda name: "start" in name or "boi" in name, "<boi>"),
    (lambda name: "end" in name or "eoi" in name, "<eoi>"),
)


def _renumber(config: PreTrainedConfig) -> None:
    """Give all marks ids that the vocabulary has."""
    for name, value in [*vars(config).items()]:
        if isinstance(value, PreTrainedConfig):
            _renumber(value)
        if name == "image_token_id" and value is None:
            value = len(word_tokenizer())
        if not name.endswith(("token_id", "token_index")) or not isinstance(value, int):
            continue
        mark = next((word for fits, word in _MARKS if fits(name)), None)
        if mark is not None:
            setattr(config, name, token_id(mark))
        elif value >= len(word_tokenizer()):
            setattr(config, name, token_id("<unk>"))
