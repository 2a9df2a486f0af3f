"""Tiny models that see, of published architectures, with random weights and processors.

Nothing is read from files: a tokenizer has a token a word, and processors make pictures small.
Where a model's own processor needs torchvision, ``PlainProcessor`` stands in.
"""

import inspect
from collections.abc import Callable
from functools import cache as once
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    Gemma3TextConfig,
    GemmaConfig,
    GotOcr2ImageProcessorPil,
    Idefics3Config,
    Idefics3ImageProcessorPil,
    Idefics3Processor,
    InternVLConfig,
    InternVLVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionImageProcessorPil,
    LlavaProcessor,
    Mistral3Config,
    MistralConfig,
    PaliGemmaConfig,
    PaliGemmaProcessor,
    PixtralImageProcessorPil,
    PixtralVisionConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

VOCAB = 199
_SPECIAL = (
    *("<pad>", "<s>", "</s>", "<unk>", "<image>", "<video>", "<boi>", "<eoi>"),
    *("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "<IMG_CONTEXT>"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "\n", "\n\n", "\n\n\n"),
    *(f"<row_{row}_col_{col}>" for row in range(1, 3) for col in range(1, 3)),
)
_TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    head_dim=16,
)
_SIGHT: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
_PIXELS = {"height": 28, "width": 28}
_CROP: dict[str, Any] = dict(size={"shortest_edge": 28}, crop_size=_PIXELS)
_TILES: dict[str, Any] = dict(image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]])


@once
def word_tokenizer() -> Any:
    """A token a word; one for all models."""
    words = [*_SPECIAL, *(f"w{i}" for i in range(VOCAB - len(_SPECIAL)))]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=[*_SPECIAL[4:]],
        extra_special_tokens={
            "image_token": "<image>",
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            "video_token": "<video>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
        },
    )


def token_id(word: str) -> int:
    """Of a word."""
    found: int = word_tokenizer().convert_tokens_to_ids(word)
    return found


class PlainProcessor:
    """Writes as many placeholders as the encoder makes features, in two rows, amid its marks."""

    def __init__(
        self, image_processor: Any, image_token: str, around: tuple[str, str, str] = ("", "", "")
    ) -> None:
        self.image_processor, self.tokenizer = image_processor, word_tokenizer()
        self.image_token, self._around = image_token, around
        self.model: Any = None  # whose encoder counts

    def __call__(
        self, *, text: list[str], images: list[list[Any]], add_special_tokens: bool = True, **_: Any
    ) -> dict[str, torch.Tensor]:
        taken = inspect.signature(self.model.base_model.get_image_features).parameters
        made = self.image_processor(images[0], return_tensors="pt")
        given = {name: made[name] for name in made if name in taken}
        words, (before, between, behind) = text[0].split(self.image_token), self._around
        written = words[0]
        for image, after in zip(images[0], words[1:], strict=True):
            alone = self.image_processor([image], return_tensors="pt")
            alone = {name: alone[name] for name in alone if name in taken}
            with torch.no_grad():
                encoded = self.model.base_model.get_image_features(**alone, return_dict=True)
            count = sum(each.reshape(-1, each.shape[-1]).shape[0] for each in encoded.pooler_output)
            row = f" {self.image_token}"
            half = count // 2
            written += f" {before}{half * row} {between}{(count - half) * row} {behind} {after}"
        ids = torch.tensor([self.tokenizer(written)["input_ids"]])
        types = (ids == self.tokenizer.convert_tokens_to_ids(self.image_token)).long()
        return {"input_ids": ids, "mm_token_type_ids": types, **given}


def _llava_kind(
    config_class: Any, processor_class: Any, picture_class: Any, **tiles: Any
) -> tuple[Any, Any]:
    config = config_class(
        vision_config=CLIPVisionConfig(**_SIGHT),
        text_config=LlamaConfig(**_TEXT),
        image_token_index=token_id("<image>"),
        vision_feature_layer=-1,
        **tiles,
    )
    return config, processor_class(
        picture_class(**_CROP, **tiles),
        word_tokenizer(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def _llava() -> tuple[Any, Any]:
    return _llava_kind(LlavaConfig, LlavaProcessor, CLIPImageProcessorPil)


def towered_llava(**sight: Any) -> tuple[Any, Any]:
    """With another tower, and images of its size."""
    config, processor = _llava()
    config.vision_config = CLIPVisionConfig(**{**_SIGHT, **sight})
    config.text_config.max_position_embeddings = 4096
    pixels = {"height": config.vision_config.image_size, "width": config.vision_config.image_size}
    processor.image_processor = CLIPImageProcessorPil(size=pixels, crop_size=pixels)
    return config, processor


def _llava_next() -> tuple[Any, Any]:
    return _llava_kind(LlavaNextConfig, LlavaNextProcessor, LlavaNextImageProcessorPil, **_TILES)


def _onevision() -> tuple[Any, Any]:
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(**_SIGHT),
        text_config=LlamaConfig(**_TEXT),
        image_token_index=token_id("<image>"),
        video_token_index=token_id("<video>"),
        vision_feature_layer=-1,
        **_TILES,
    )
    pictures = LlavaOnevisionImageProcessorPil(size=_PIXELS, **_TILES)
    return config, PlainProcessor(pictures, "<image>")


def _idefics3() -> tuple[Any, Any]:
    config = Idefics3Config(
        vision_config=dict(_SIGHT),
        text_config=LlamaConfig(**_TEXT),
        image_token_id=token_id("<image>"),
        scale_factor=2,
    )
    return config, Idefics3Processor(
        Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28}),
        word_tokenizer(),
        image_seq_len=1,
    )


def _mistral3() -> tuple[Any, Any]:
    config = Mistral3Config(
        vision_config=PixtralVisionConfig(**{**_SIGHT, "image_size": 112}, head_dim=16),
        text_config=MistralConfig(**_TEXT, sliding_window=None),
        image_token_index=token_id("[IMG]"),
        vision_feature_layer=-1,
    )
    pictures = PixtralImageProcessorPil(size={"longest_edge": 84}, patch_size=28)
    return config, PlainProcessor(pictures, "[IMG]", around=("", "[IMG_BREAK]", "[IMG_END]"))


def _internvl() -> tuple[Any, Any]:
    sight = {**_SIGHT, "image_size": [56, 56], "patch_size": [14, 14]}
    config = InternVLConfig(
        vision_config=InternVLVisionConfig(**sight),
        text_config=LlamaConfig(**_TEXT),
        image_token_id=token_id("<IMG_CONTEXT>"),
        image_seq_length=1,
    )
    size = {"height": 56, "width": 56}
    pictures = GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, max_patches=3)
    return config, PlainProcessor(pictures, "<IMG_CONTEXT>", around=("<img>", "", "</img>"))


def _gemma3() -> tuple[Any, Any]:
    config = Gemma3Config(
        vision_config=SiglipVisionConfig(**{**_SIGHT, "image_size": 56}),
        text_config=Gemma3TextConfig(
            **_TEXT,
            query_pre_attn_scalar=16,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention"],
        ),
        mm_tokens_per_image=4,
        image_token_index=token_id("<image>"),
        boi_token_index=token_id("<boi>"),
        eoi_token_index=token_id("<eoi>"),
    )
    pictures = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    return config, Gemma3Processor(pictures, word_tokenizer(), image_seq_length=4)


def _paligemma() -> tuple[Any, Any]:
    config = PaliGemmaConfig(
        vision_config=SiglipVisionConfig(**_SIGHT, projection_dim=64),
        text_config=GemmaConfig(**_TEXT),
        image_token_index=token_id("<image>"),
        projection_dim=64,
    )
    pictures = SiglipImageProcessorPil(size=_PIXELS)
    pictures.image_seq_length = 4
    return config, PaliGemmaProcessor(pictures, word_tokenizer())


def _qwen(config_class: Any, sight: dict[str, Any]) -> tuple[Any, Any]:
    config = config_class(
        vision_config=sight,
        text_config=dict(
            **_TEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        ),
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
    )
    size = {"shortest_edge": 28 * 28, "longest_edge": 112 * 112}
    pictures = Qwen2VLImageProcessorPil(
        patch_size=sight["patch_size"], size=size, temporal_patch_size=2, merge_size=2
    )
    around = ("<|vision_start|>", "", "<|vision_end|>")
    return config, PlainProcessor(pictures, "<|image_pad|>", around=around)


def _qwen2_vl() -> tuple[Any, Any]:
    sight = dict(
        depth=2,
        embed_dim=32,
        hidden_size=64,
        num_heads=2,
        mlp_ratio=2,
        patch_size=14,
        in_channels=3,
    )
    return _qwen(Qwen2VLConfig, sight)


def _qwen2_5_vl() -> tuple[Any, Any]:
    sight = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        out_hidden_size=64,
        patch_size=14,
        window_size=56,
        fullatt_block_indexes=[1],
    )
    return _qwen(Qwen2_5_VLConfig, sight)


def _qwen3_vl() -> tuple[Any, Any]:
    sight = dict(
        depth=2,
        hidden_size=32,
        intermediate_size=48,
        num_heads=2,
        out_hidden_size=64,
        patch_size=14,
        deepstack_visual_indexes=[0, 1],
        num_position_embeddings=16,
    )
    return _qwen(Qwen3VLConfig, sight)


SEERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _onevision,
    "idefics3": _idefics3,
    "mistral3": _mistral3,
    "internvl": _internvl,
    "gemma3": _gemma3,
    "paligemma": _paligemma,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
}


@once
def seer(name: str) -> tuple[PreTrainedModel, Any]:
    """A model of ``SEERS`` in float32, whose texts never say that they end, and its processor."""
    config, processor = SEERS[name]()
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    model = model.eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.1)
    if isinstance(processor, PlainProcessor):
        processor.model = model
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model, processor


def picture(seed: int, height: int = 90, width: int = 70) -> NDArray[np.uint8]:
    """Noise u8[height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
