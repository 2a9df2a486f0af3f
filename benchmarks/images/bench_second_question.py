"""Measure the first byte of a second question about the same image, against that of the first.

A tiny decoder behind a tower of a real one's size (SigLIP so400m's widths and depth, or fewer
layers), whose image has 1,024 tokens. Cold: the picture is new, so the tower and all tokens are
computed. Warm: another question about a picture that was shown before. A/A: two cold ones.
Questions of all kinds come in turns.

    python -m benchmarks.images.bench_second_question --rounds 9
"""

import argparse
import json
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForImageTextToText,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

from benchmarks.harness.os_memory import machine
from quire import LLM, SamplingParams

SIDE, PATCH = 448, 14  # 32 × 32 patches, each a token
WORDS = ("<pad>", "<s>", "</s>", "<unk>", "<image>", *(f"w{n}" for n in range(251)))


def model_of(layers: int) -> tuple[Any, Any]:
    """A model in float32 and its processor; the tower has ``layers`` layers."""
    words = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens={"image_token": "<image>"},
    )
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=layers,
            num_attention_heads=16,
            image_size=SIDE,
            patch_size=PATCH,
        ),
        text_config=LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
        ),
        image_token_index=WORDS.index("<image>"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval().float()
    processor = LlavaProcessor(
        SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
    )
    return model, processor


def first_byte_s(llm: LLM, picture: Any, question: str) -> tuple[float, int, int]:
    """Seconds until the first token, from the call with pixels on; cached and prompt tokens."""
    prompt = {"prompt": f"<image> {question}", "multi_modal_data": {"image": picture}}
    begin = perf_counter()
    first = next(iter(llm.stream(prompt, SamplingParams(max_tokens=1, temperature=0))))
    took = perf_counter() - begin
    return took, first.num_cached_tokens, 1024 + len(question.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--layers", type=int, default=27, help="of the tower; so400m has 27")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model, processor = model_of(options.layers)
    tower = sum(p.numel() for p in model.base_model.vision_tower.parameters())
    random = np.random.default_rng(options.seed)
    times: dict[str, list[float]] = {"cold": [], "warm": [], "cold again": []}
    computed: dict[str, set[int]] = {name: set() for name in times}
    with LLM(model, tokenizer=processor, max_model_len=2048, kv_cache_memory_bytes="512MB") as llm:
        first_byte_s(llm, random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8), "w1 w2")
        for number in range(options.rounds):
            pictures = [random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for _ in range(2)]
            question = " ".join(f"w{number + word}" for word in range(8))
            for name, picture, asked in (
                ("cold", pictures[0], question),
                ("warm", pictures[0], "w200 " + question),
                ("cold again", pictures[1], question),
            ):
                took, cached, total = first_byte_s(llm, picture, asked)
                times[name].append(took)
                computed[name].add(total - cached)
    ratios = [warm / cold for warm, cold in zip(times["warm"], times["cold"], strict=True)]
    same = [b / a for a, b in zip(times["cold"], times["cold again"], strict=True)]
    print(
        json.dumps(
            {
                "tower_parameters": tower,
                "tower_layers": options.layers,
                "machine": machine(),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "seed": options.seed,
                "median_s": {name: round(median(each), 4) for name, each in times.items()},
                "range_s": {
                    name: [round(min(each), 4), round(max(each), 4)] for name, each in times.items()
                },
                "computed_tokens": {name: sorted(each) for name, each in computed.items()},
                "warm_over_cold": [round(x, 4) for x in (median(ratios), min(ratios), max(ratios))],
                "A/A": [round(x, 4) for x in (median(same), min(same), max(same))],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
