"""One class that sees, judged: with pictures the engine must say what ``generate()`` says."""

from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from quire import LLM, SamplingParams
from quire.engine.outputs import CompletionOutput
from quire.errors import QuireError
from seers import SEERS, picture, seer
from zoo.finding import ANOTHER_WAY, Finding, one_line
from zoo.sight import seeing_class, tiny_seer

_NEW = 8
_OPTIONS: dict[str, Any] = dict(kv_cache_memory_bytes="16MB", max_model_len=512, block_size=4)
_GREEDY = SamplingParams(max_tokens=_NEW, temperature=0, ignore_eos=True)
_Shown = dict[str, Any]  # a prompt with its pictures


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
    prompts = _prompts(processor.image_token)
    try:
        expected = [_generated(model, processor, prompt) for prompt in prompts]
        sees = _sees(model, processor)
    except Exception as error:
        found.not_generated = one_line(error)
        return found
    if not sees:
        found.not_generated = "at this size another picture changes no logit"
        return found
    try:
        differ = _differing(model, processor, prompts, expected, found)
    except _Refused as refused:
        found.verdict, found.reason = "refused", str(refused)
    except QuireError as error:
        found.verdict, found.reason = "refused", one_line(error)
    except Exception as error:
        found.verdict, found.reason = "fails", one_line(error)
    else:
        found.verdict = "differs" if differ else "exact"
        if differ:
            found.reason = f"greedy tokens are not those of generate(): {', '.join(differ)}"
    return found


class _Refused(Exception):
    """The engine runs the text of the class, and says why it sees nothing."""


def _differing(
    model: PreTrainedModel,
    processor: Any,
    prompts: list[_Shown],
    expected: list[list[int]],
    found: Finding,
) -> list[str]:
    """The situations in which the engine does not say what is expected.

    The first of ``prompts`` has an image between texts, the second another one in its place, the
    third begins with one, the fourth has several.
    """
    amid, other, first, several = range(4)
    said: dict[str, bool] = {}

    def note(situation: str, texts: list[list[int]], which: list[int]) -> None:
        said[situation] = texts == [expected[number] for number in which]

    with _engine(model, processor, max_num_batched_tokens=64) as llm:
        found.way = llm.attention_way
        if llm.engine.scheduler.limits.whole_images:
            found.way = "alone, images whole"
        note("one image", _said(llm, [prompts[first]]), [first])
        note("an image between texts", _said(llm, [prompts[amid]]), [amid])
        note("several images", _said(llm, [prompts[several]]), [several])
        again = [llm.generate(prompts[number], _GREEDY)[0] for number in (amid, first, several)]
        found.num_cached_tokens = min(done.num_cached_tokens for done in again)
        begins = [llm.request(prompts[number]).keys.images[0].start for number in (amid, several)]
        # Of a short image no block is full: then the prompt with several is found.
        hit = [
            done.num_cached_tokens > start for done, start in zip(again[::2], begins, strict=True)
        ]
        note("a prefix hit", [_tokens(done) for done in again], [amid, first, several])
        said["a prefix hit"] &= any(hit)
    with _engine(model, processor, max_num_batched_tokens=5, enable_prefix_caching=False) as llm:
        note("two images in one batch", _said(llm, prompts[:2]), [amid, other])
        note("cut chunks", _said(llm, prompts), [amid, other, first, several])
        four = replace(_GREEDY, n=4)
        [done] = llm.generate(prompts[several], four)
        note("n = 4", [list(choice.token_ids) for choice in done.choices], [several] * 4)
        texts, preemptions = _interrupted(llm, prompts)
        note("preempted", texts, [amid, other, first, several])
        said["preempted"] &= preemptions > 2
    return [situation for situation, is_right in said.items() if not is_right]


def _engine(model: PreTrainedModel, processor: Any, **options: Any) -> LLM:
    """An engine that shows images. Raises: _Refused, and what it raises."""
    llm = LLM(model, tokenizer=processor, **_OPTIONS, **options)
    if why_not := llm.facts.vision.why_not:
        llm.close()
        raise _Refused(why_not)
    return llm


def _interrupted(llm: LLM, prompts: list[_Shown]) -> tuple[list[list[int]], int]:
    """What is said where every third step makes room, and how often a sequence began anew."""
    sequences = [
        sequence
        for prompt in prompts
        for sequence in llm.start(llm.request(prompt, _GREEDY), lambda _: None)
    ]
    count = 0
    while llm.step():
        count += 1
        if count % 3 == 0 and count < 100:
            llm.engine.scheduler.preempt_youngest(spare_oldest=True)
    texts = [list(sequence.output_token_ids) for sequence in sequences]
    return texts, sum(sequence.num_preemptions for sequence in sequences)


def _prompts(placeholder: str) -> list[_Shown]:
    """As ``_differing`` takes them."""
    return [
        _shown(f"w1 w2 {placeholder} w3", picture(1)),
        _shown(f"w1 w2 {placeholder} w3", picture(2)),
        _shown(f"{placeholder} w4 w8", picture(4)),
        _shown(f"{placeholder} w5 w6 {placeholder} w9 w10", picture(1), picture(3, 56, 84)),
    ]


def _shown(text: str, *images: Any) -> _Shown:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}}


def _made(model: PreTrainedModel, processor: Any, prompt: _Shown) -> dict[str, Any]:
    images = prompt["multi_modal_data"]["image"]
    made = processor(text=[prompt["prompt"]], images=[images], return_tensors="pt")
    taken = signature(model.forward).parameters
    given = {name: each for name, each in made.items() if name in taken}
    return {**given, "attention_mask": torch.ones_like(made["input_ids"])}


def _generated(model: PreTrainedModel, processor: Any, prompt: _Shown) -> list[int]:
    given = _made(model, processor, prompt)
    with torch.no_grad():
        out: Any = model.generate(**given, max_new_tokens=_NEW, do_sample=False, pad_token_id=0)
    tokens: list[int] = out[0, given["input_ids"].shape[1] :].tolist()
    return tokens


def _sees(model: PreTrainedModel, processor: Any) -> bool:
    """Whether another picture gives other logits."""
    text = f"w1 {processor.image_token} w3"
    with torch.no_grad():
        a, b = (
            model(**_made(model, processor, _shown(text, picture(seed)))).logits[0, -1].numpy()
            for seed in (1, 2)
        )
    return bool(np.abs(a - b).max() > 1e-3 * np.abs(a).max())


def _said(llm: LLM, several: list[_Shown]) -> list[list[int]]:
    return [_tokens(done) for done in llm.generate(several, _GREEDY)]


def _tokens(done: CompletionOutput) -> list[int]:
    return list(done.choices[0].token_ids)
