"""One class that sees, judged: with pictures the engine must say what ``generate()`` says."""

from collections.abc import Sequence
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
from zoo.finding import NOT_JUDGED, VIDEOS, Finding, another_way, one_line
from zoo.sight import AS_IMAGES, seeing_class, tiny_seer

_NEW = 8
_OPTIONS: dict[str, Any] = dict(kv_cache_memory_bytes="16MB", max_model_len=512, block_size=4)
_GREEDY = SamplingParams(max_tokens=_NEW, temperature=0, ignore_eos=True)
_Shown = dict[str, Any]  # a prompt with its pictures


def check_sight(model_type: str) -> Finding:
    """All that is found out about one class. Raises: nothing that the class or the engine does."""
    own = seeing_class(model_type)
    found = Finding(model_type=model_type, class_name=own.__name__)
    if "mm_encoder_outputs" not in signature(own.forward).parameters:
        found.verdict, found.reason = "refused", another_way(model_type)
        return found
    try:
        model, processor = seer(model_type) if model_type in SEERS else tiny_seer(model_type)
    except Exception as error:
        found.not_built = NOT_JUDGED.get(model_type) or one_line(error)
        return found
    prompts = _prompts(processor.image_token)
    try:
        expected = [_generated(model, processor, prompt) for prompt in prompts]
        sees = _sees(model, processor, *prompts[:2])
    except Exception as error:
        found.not_generated = NOT_JUDGED.get(model_type) or one_line(error)
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
        found.reason = differ
    if found.verdict == "exact":
        found.videos = _videos(model_type)
    return found


def _videos(model_type: str) -> str:
    """The same of videos, and of a prompt with a video and an image: "exact", or why not."""
    try:
        model, processor = tiny_seer(model_type)
    except Exception as error:
        return f"not judged: {one_line(error)}"
    if processor.video_processor is None:
        return ""
    if model_type in VIDEOS:
        return VIDEOS[model_type]
    prompts = [
        _shown("w1 w2 <video> w3", videos=[_frames(1)]),
        _shown("w1 w2 <video> w3", videos=[_frames(2)]),
        _shown("<video> w4 w8", videos=[_frames(4, 7)]),
        _shown("<video> w5 w6 <image> w9 w10", picture(1), videos=[_frames(1)]),
    ]
    if model.config.model_type in AS_IMAGES:  # a prompt cannot have both
        prompts[3] = _shown("<video> w5 w6 <video> w9", videos=[_frames(1), _frames(3)])
    try:
        expected = [_generated(model, processor, prompt) for prompt in prompts]
        sees = _sees(model, processor, *prompts[:2])
    except Exception as error:
        return f"not judged: {one_line(error)}"
    if not sees:
        return "not judged: at this size another video changes no logit"
    unused = Finding(model_type=model_type, class_name="")
    try:
        return _differing(model, processor, prompts, expected, unused) or "exact"
    except Exception as error:
        return one_line(error) if not isinstance(error, _Refused) else str(error)


class _Refused(Exception):
    """The engine runs the text of the class, and says why it sees nothing."""


def _differing(
    model: PreTrainedModel,
    processor: Any,
    prompts: list[_Shown],
    expected: list[list[int]],
    found: Finding,
) -> str:
    """The situations in which the engine does not say what is expected; empty if there is none.

    The first of ``prompts`` has an image between texts, the second another one in its place, the
    third begins with one, the fourth has several.
    """
    amid, other, first, several = range(4)
    said: dict[str, bool] = {}

    def note(situation: str, texts: list[list[int]], which: list[int]) -> None:
        said[situation] = texts == [expected[number] for number in which]

    with _engine(model, processor, max_num_batched_tokens=64) as llm:
        for modality in {name for prompt in prompts for name in prompt["multi_modal_data"]}:
            if why_not := llm.facts.vision.of_kind(modality).why_not:
                raise _Refused(why_not)
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
    wrong = [situation for situation, is_right in said.items() if not is_right]
    return f"greedy tokens are not those of generate(): {', '.join(wrong)}" if wrong else ""


def _engine(model: PreTrainedModel, processor: Any, **options: Any) -> LLM:
    """An engine. Raises: what it raises."""
    llm = LLM(model, tokenizer=processor, **_OPTIONS, **options)
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


def _shown(text: str, *images: Any, videos: Sequence[Any] = ()) -> _Shown:
    given = {"image": list(images), "video": list(videos)}
    return {"prompt": text, "multi_modal_data": {name: own for name, own in given.items() if own}}


def _frames(seed: int, number: int = 4) -> Any:
    return np.stack([picture(100 * seed + frame, 40, 40) for frame in range(number)])


def _made(model: PreTrainedModel, processor: Any, prompt: _Shown) -> dict[str, Any]:
    data = prompt["multi_modal_data"]
    given: dict[str, Any] = {"images": [data["image"]]} if "image" in data else {}
    if "video" in data:
        given["videos"] = data["video"]
    made = processor(text=[prompt["prompt"]], return_tensors="pt", **given)
    taken = signature(model.forward).parameters
    found = {name: each for name, each in made.items() if name in taken}
    return {**found, "attention_mask": torch.ones_like(made["input_ids"])}


def _generated(model: PreTrainedModel, processor: Any, prompt: _Shown) -> list[int]:
    given = _made(model, processor, prompt)
    with torch.no_grad():
        out: Any = model.generate(**given, max_new_tokens=_NEW, do_sample=False, pad_token_id=0)
    tokens: list[int] = out[0, given["input_ids"].shape[1] :].tolist()
    return tokens


def _sees(model: PreTrainedModel, processor: Any, one: _Shown, other: _Shown) -> bool:
    """Whether another picture gives other logits."""
    with torch.no_grad():
        a, b = (
            model(**_made(model, processor, prompt)).logits[0, -1].numpy()
            for prompt in (one, other)
        )
    said = a > np.finfo(a.dtype).min / 2  # of other tokens it says that it never gives them
    return bool(np.abs(a - b)[said].max() > 1e-3 * np.abs(a[said]).max())


def _said(llm: LLM, several: list[_Shown]) -> list[list[int]]:
    return [_tokens(done) for done in llm.generate(several, _GREEDY)]


def _tokens(done: CompletionOutput) -> list[int]:
    return list(done.choices[0].token_ids)
