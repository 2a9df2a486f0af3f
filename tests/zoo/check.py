"""One class, built, run and judged: the engine must say what the model says by itself.

The model's own full forward, without a cache, is what the engine's logits are held against. Its
``generate`` is what greedy tokens are held against, where it says the same with a cache as without.
"""

import inspect
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

import quire
from quire import LLM, SamplingParams
from quire.cli.plan_validation import validate
from quire.config import EngineConfig
from quire.engine.sequence import Sequence
from quire.errors import QuireError
from quire.memory import HostMemory
from quire.memory.machine import read_machine
from quire.models.cache_argument import cache_argument
from quire.models.loader import adopt
from quire.planner.capacity import PlanTarget
from quire.planner.sequence_memory import PlannedLengths
from quire.planner.subject import find_subject
from quire.spec import (
    ChunkedAttention,
    FullAttention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
)
from zoo import schedule
from zoo.build import tiny_model
from zoo.caches import cache_after, expected_of, held_by
from zoo.finding import Finding, one_line
from zoo.sizes import causal_class

EXACT, EXACT_WITH_SCANS = 1e-5, 1e-3  # of the largest logit, fp32
NUM_NEW = 8
_WORDS: dict[type[LayerSpec], str] = {
    FullAttention: "full",
    SlidingWindow: "sliding",
    ChunkedAttention: "chunked",
    LatentAttention: "latent",
    RecurrentState: "recurrent",
}
# Whose cache holds something else than what is read again, and why.
_KEEPS_OTHERWISE = {
    "minimax": "the states of its linear layers beside Transformers' list of layers",
}
_T = TypeVar("_T")


def check(model_type: str) -> Finding:
    """All that is found out about one class. Raises: nothing that the class or the engine does."""
    found = Finding(model_type=model_type, class_name=causal_class(model_type).__name__)
    model, found.not_built = _attempt(lambda: tiny_model(model_type))
    if model is None:
        return found
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    several = schedule.prompts(vocab_size)
    texts, found.not_generated = _attempt(lambda: [_generated(model, p) for p in several])
    plain, _ = _attempt(lambda: [_greedy(model, p) for p in several])
    found.own_cache_is_right = texts is not None and texts == plain
    spec, found.reason = _attempt(lambda: adopt(model).spec)
    if spec is None:
        found.verdict = "refused"
        return found
    found.kinds = _kinds(spec)
    if model_type not in _KEEPS_OTHERWISE:
        found.bytes_differ = _bytes_differ(model, spec, several[0])
    found.drop_in = _drop_in(model, several, texts)
    try:
        llm = LLM(model, **schedule.OPTIONS)
    except Exception as error:
        found.verdict = "refused" if isinstance(error, QuireError) else "fails"
        found.reason = one_line(error)
        return found
    with llm:
        found.way = _way(llm)
        try:
            rows, found.num_cached_tokens = schedule.run(llm, several)
            greedy = _engine_greedy(llm, several)
        except Exception as error:
            found.verdict, found.reason = "fails", one_line(error)
            return found
    with LLM(model, **schedule.OPTIONS, enable_prefix_caching=False) as llm:
        found.bytes_differ = found.bytes_differ or schedule.bytes_differ(llm, several[0])
    planned, error = _attempt(lambda: _planned_otherwise(model))
    found.bytes_differ = found.bytes_differ or planned or error
    found.num_rows, found.deviation = len(rows), _deviation(model, rows)
    limit = EXACT_WITH_SCANS if "recurrent" in found.kinds else EXACT
    if not found.deviation <= limit:
        found.verdict = "differs"
        found.reason = f"logits are {found.deviation:.0e} of the largest apart"
    elif found.own_cache_is_right and greedy != texts:
        found.verdict, found.reason = "differs", "greedy tokens are not those of generate()"
    elif found.bytes_differ:
        found.verdict, found.reason = "differs", found.bytes_differ
    else:
        found.verdict = "exact"
    return found


def _attempt(make: Callable[[], _T]) -> tuple[_T | None, str]:
    """What it makes, or what it raises, in a line."""
    try:
        return make(), ""
    except Exception as error:
        return None, one_line(error)


def _generated(model: PreTrainedModel, prompt: list[int], cache: Any = None) -> list[int]:
    """The tokens that Transformers' generate() adds, greedily; with its own cache or another."""
    options: dict[str, Any] = dict(
        max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    if getattr(model.generation_config, "forced_eos_token_id", None) is not None:
        options["forced_eos_token_id"] = None
    if cache is not None:
        options[cache_argument(model.forward)] = cache
    ids = torch.tensor([prompt])
    tokens: list[int] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0]
    return [int(token) for token in tokens[len(prompt) :]]


def _drop_in(
    model: PreTrainedModel, several: list[list[int]], texts: list[list[int]] | None
) -> str:
    """What generate() with ``quire.cache`` does otherwise than with its own; nothing, if not."""

    def generated(prompt: list[int]) -> list[int]:
        with quire.cache(model, kv_cache_memory_bytes="8MB", max_model_len=64) as cache:
            return _generated(model, prompt, cache)

    made, error = _attempt(lambda: [generated(prompt) for prompt in several])
    return error or ("" if made == texts else "other tokens than with its own cache")


def _greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """The same without any cache."""
    tokens = list(prompt)
    for _ in range(NUM_NEW):
        tokens.append(int(_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def _engine_greedy(llm: LLM, several: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    return [list(completion.token_ids) for completion in llm.generate(several, params)]


def _logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """The model's own, [T, vocabulary], with the positions that generate() gives it."""
    options: dict[str, Any] = {"use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:
        options["position_ids"] = torch.arange(len(tokens))[None]
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens]), **options).logits[0]
    return logits


def _deviation(model: PreTrainedModel, rows: list[tuple[Sequence, int, Tensor]]) -> float:
    """The worst of all rows, of its sequence's largest logit."""
    own = {sequence.seq_id: _logits(model, sequence.token_ids) for sequence, _, _ in rows}
    worst = 0.0
    for sequence, at, row in rows:
        logits = own[sequence.seq_id]
        apart = float((row - logits[at]).abs().max() / logits.abs().max())
        worst = max(worst, apart) if apart == apart else float("inf")
    return worst


def _kinds(spec: ModelSpec) -> list[str]:
    """Of its layers, in their order; "shared" where some read another's."""
    kinds = [_WORDS[type(kept)] for layer in spec.layers for kept in layer.specs]
    shared = ["shared"] if any(layer.shares_with is not None for layer in spec.layers) else []
    return list(dict.fromkeys(kinds + shared))


def _way(llm: LLM) -> str:
    """How the engine runs it."""
    return f"{llm.attention_way}, with states" if llm.spec.recurrent_layers else llm.attention_way


def _planned_otherwise(model: PreTrainedModel) -> str:
    """What ``quire plan`` says of the model's config.json alone, and the engine does not."""
    memory = HostMemory()
    place = PlanTarget(
        machine=read_machine(),
        page_bytes=memory.page_bytes,
        can_share=memory.cannot_share is None,
        max_mappings=None,
    )
    with TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        subject = find_subject(f"{folder}/config.json", dtype="float32")
    checks = validate(
        adopt(model),
        subject,
        EngineConfig.from_options(**schedule.OPTIONS),
        place,
        PlannedLengths(input_tokens=schedule.LENGTHS[0], output_tokens=12),
        strategies=["paged"],
    )
    return "; ".join(
        f"{check.what}: planned {check.planned}, it is {check.actual}"
        for check in checks
        if not check.holds
    )


def _bytes_differ(model: PreTrainedModel, spec: ModelSpec, prompt: list[int]) -> str:
    """Where Transformers' own cache holds something else than the spec says; nothing if nowhere."""
    tokens = torch.tensor(
        [schedule.prompts(model.config.get_text_config(decoder=True).vocab_size)[0]]
    )
    cache, _ = _attempt(lambda: cache_after(model, tokens))
    if cache is None:
        return ""  # it has none, or of a kind of its own
    held = [held_by(layer) for layer in cache.layers]
    expected = [expected_of(layer, tokens.shape[1]) for layer in spec.layers]
    if len(held) != len(expected):
        return f"its cache has {len(held)} layers, the spec {len(expected)}"
    for index, (has, should) in enumerate(zip(held, expected, strict=True)):
        if has != should:
            return f"layer {index} of its cache holds {has}, and the spec says {should}"
    return ""
