"""One class that sees, judged: with pictures the engine must say what ``generate()`` says."""

from inspect import signature
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from quire import LLM, SamplingParams
from quire.errors import QuireError
from seers import SEERS, picture, seer
from zoo.finding import ANOTHER_WAY, Finding, one_line
from zoo.sight import seeing_class, tiny_seer

_NEW = 8
# Chunks of five tokens cut an image; all sequences run together.
_OPTIONS: dict[str, Any] = dict(
    kv_cache_memory_bytes="16MB", max_model_len=512, block_size=4, max_num_batched_tokens=5
)
_GREEDY = SamplingParams(max_tokens=_NEW, temperature=0, ignore_eos=True)


def check_sight(model_type: str) -> Finding:
    """All that is found out about one class. Raises: nothing that the class or the engine does."""
    own = seeing_class(model_type)
    found = Finding(model_type=model_type, class_name=own.__name__)
    if "mm_encoder_outputs" not in signature(own.forward).parameters:
        found.verdict, found.reason = "refused", ANOTHER_WAY
        return found
    try:
        model, processor = seer(model_type) if model_type in SEERS else tiny_seer(model_type)
    except Exception as error:
        found.not_built = one_line(error)
        return found
    several = _prompts(processor.image_token)
    try:
        texts = [_generated(model, processor, *prompt) for prompt in several]
        sees = _sees(model, processor)
    except Exception as error:
        found.not_generated = one_line(error)
        return found
    if not sees:
        found.not_generated = "at this size another picture changes no logit"
        return found
    given = [
        {"prompt": text, "multi_modal_data": {"image": list(images)}} for text, images in several
    ]
    try:
        llm = LLM(model, tokenizer=processor, **_OPTIONS)
    except Exception as error:
        found.verdict = "refused" if isinstance(error, QuireError) else "fails"
        found.reason = one_line(error)
        return found
    with llm:
        if why_not := llm.facts.vision.why_not:
            found.verdict, found.reason = "refused", why_not
            return found
        found.way = llm.attention_way
        if llm.engine.scheduler.limits.whole_images:
            found.way = "alone, images whole"
        try:
            together = _said(llm, given)
            again = [_said(llm, [prompt])[0] for prompt in given]
            [last] = llm.generate(given[0], _GREEDY)
            found.num_cached_tokens = last.num_cached_tokens
        except Exception as error:
            found.verdict, found.reason = "fails", one_line(error)
            return found
    found.verdict = "exact" if together == again == texts else "differs"
    if found.verdict == "differs":
        which = "found in the prefix cache" if together == texts else "in chunks"
        found.reason = f"greedy tokens are not those of generate(): {which}"
    return found


def _prompts(placeholder: str) -> list[tuple[str, tuple[Any, ...]]]:
    """One picture, another in its place, and two of which one is the first."""
    return [
        (f"w1 w2 {placeholder} w3", (picture(1),)),
        (f"w1 w2 {placeholder} w3", (picture(2),)),
        (f"{placeholder} w5 w6 {placeholder} w9 w10", (picture(1), picture(3, 56, 84))),
    ]


def _made(model: PreTrainedModel, processor: Any, text: str, images: Any) -> dict[str, Any]:
    made = processor(text=[text], images=[list(images)], return_tensors="pt")
    taken = signature(model.forward).parameters
    given = {name: each for name, each in made.items() if name in taken}
    return {**given, "attention_mask": torch.ones_like(made["input_ids"])}


def _generated(model: PreTrainedModel, processor: Any, text: str, images: Any) -> list[int]:
    """What Transformers' generate() adds, greedily."""
    given = _made(model, processor, text, images)
    with torch.no_grad():
        out: Any = model.generate(**given, max_new_tokens=_NEW, do_sample=False, pad_token_id=0)
    tokens: list[int] = out[0, given["input_ids"].shape[1] :].tolist()
    return tokens


def _sees(model: PreTrainedModel, processor: Any) -> bool:
    """Whether another picture gives other logits."""
    text = f"w1 {processor.image_token} w3"
    with torch.no_grad():
        a, b = (
            model(**_made(model, processor, text, [picture(seed)])).logits[0, -1].numpy()
            for seed in (1, 2)
        )
    return bool(np.abs(a - b).max() > 1e-3 * np.abs(a).max())


def _said(llm: LLM, several: list[Any]) -> list[list[int]]:
    return [list(done.choices[0].token_ids) for done in llm.generate(several, _GREEDY)]
