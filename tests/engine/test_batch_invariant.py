"""A batch-invariant text is the same to the bit, whatever else is in the batch and on the way.

Random schedules (``engine.schedules``) in bfloat16, float32 and with small weights: each token of
each sequence, and the logarithms of its likeliest tokens' probabilities, must be those that the
prompt gets alone, whole in one chunk, in another engine. Not one may differ.

The whole: pytest tests/engine/test_batch_invariant.py -m 'full or not full'
"""

from collections import deque
from functools import cache, partial
from typing import Any

import pytest
import torch

from conformance.covering import only
from engine.schedules import LONGEST_OUTPUT, Result, Schedule, prompts
from quire import LLM, SamplingParams
from quire.engine.outputs import TextDelta
from quire.engine.sequence import Sequence
from quire.engine.step_plan import TokenLogprobs
from quire.errors import ConfigError
from quire.kv import STRATEGIES
from quire.models.loader import LoadedModel, load
from quire.models.recorded import recordings
from tiny import tiny_model

# What the demo model is computed in: dtype, quantization, the keys' and values' dtype.
FORMS = (
    ("bfloat16", None, "auto"),
    ("float32", None, "auto"),
    ("bfloat16", "int8", "auto"),
    ("bfloat16", "int4", "int8_per_token_head"),
    ("float32", "int4-g128-asym", "fp8"),
)
Form = tuple[str, str | None, str]
Found = tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]


@cache
def loaded(dtype: str, quantization: str | None) -> LoadedModel:
    return load(dtype=dtype, quantization=quantization)


def params_of(which: int, max_tokens: int) -> SamplingParams:
    """The same for a prompt in every schedule: half of them are drawn."""
    drawn = which % 2 == 1
    return SamplingParams(
        temperature=0.9 if drawn else 0,
        top_p=0.95 if drawn else 1.0,
        repetition_penalty=1.1 if which % 3 == 0 else 1.0,
        seed=which,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=2,
    )


@cache
def alone(which: int, form: Form) -> Found:
    """By itself: the prompt in one chunk, then token after token."""
    dtype, quantization, kv_cache_dtype = form
    with LLM(
        loaded(dtype, quantization),
        batch_invariant=True,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes="1MiB",
        max_model_len=128,
        max_num_seqs=1,
        enable_prefix_caching=False,
    ) as llm:
        (done,) = llm.generate([list(prompts()[which])], params_of(which, LONGEST_OUTPUT))
        return done.token_ids, done.choices[0].logprobs


class InvariantSchedule(Schedule):
    """Of a form of the demo model."""

    def __init__(self, seed: int, form: Form, *, is_invariant: bool = True) -> None:
        super().__init__(seed)
        dtype, quantization, kv_cache_dtype = self.form = form
        self.loaded = partial(loaded, dtype, quantization)
        self.options |= {"batch_invariant": is_invariant, "kv_cache_dtype": kv_cache_dtype}
        self.options["block_size"] = self.rng.choice([4, 16, 32])
        self.options["enforce_eager"] = self.rng.random() < 0.3

    def params(self, which: int) -> SamplingParams:
        return params_of(which, self.rng.randint(4, LONGEST_OUTPUT))

    def compare(self, which: int, sequence: Sequence, result: Result) -> None:
        result.num_sequences += 1
        result.num_cached_tokens += sequence.num_cached_tokens
        told, want = sequence.output_token_ids, list(alone(which, self.form)[0])
        if told != want[: len(told)]:
            result.faults.append(f"seed {self.seed}, {self.options}: prompt {which}")

    def compare_deltas(self, which: int, deltas: deque[TextDelta]) -> None:
        told = tuple(each for delta in deltas for each in delta.logprobs)
        assert told == alone(which, self.form)[1][: len(told)], f"seed {self.seed}, {self.options}"


def run(seeds: range, form: Form) -> Result:
    total = Result()
    for seed in seeds:
        total.add(InvariantSchedule(seed, form).run())
    assert not total.faults
    return total


@pytest.fixture(autouse=True)
def _recorded_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that steps of all kinds are played, and some are not."""
    monkeypatch.setattr(recordings, "WORTH_IT", 3)


@pytest.mark.parametrize("number", only(range(len(FORMS)), 0, 3))
def test_random_schedules(number: int) -> None:
    assert run(range(number, number + 1), FORMS[number]).num_sequences


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form)))
def test_a_thousand_schedules(form: Form) -> None:
    total = run(range(200), form)
    assert total.num_preemptions > 100
    assert total.num_cached_tokens > 1000
    print(total)


def test_without_the_option_some_differ() -> None:
    """Else the tests above would say nothing."""
    different = 0
    for seed in range(3):
        try:
            different += len(InvariantSchedule(seed, FORMS[0], is_invariant=False).run().faults)
        except AssertionError:
            different += 1
    assert different


@pytest.mark.parametrize("cache", STRATEGIES.own_names)
def test_each_strategy_gives_the_same(cache: str) -> None:
    """With the same logarithms, and a batch of others."""
    with LLM(
        loaded("bfloat16", None),
        batch_invariant=True,
        cache=cache,
        kv_cache_memory_bytes="8MiB",
        max_model_len=128,
    ) as llm:
        several = [1, 6, 12]
        done = llm.generate(
            [list(prompts()[which]) for which in several],
            [params_of(which, LONGEST_OUTPUT) for which in several],
        )
        for which, each in zip(several, done, strict=True):
            assert (each.token_ids, each.choices[0].logprobs) == alone(which, FORMS[0])


# -- what is refused -------------------------------------------------------------------------------


def refused(model: Any, **options: Any) -> str:
    with pytest.raises(ConfigError, match="batch_invariant") as error:
        LLM(model, batch_invariant=True, kv_cache_memory_bytes="4MiB", **options).close()
    return str(error.value)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_a_model_that_mixes_rows_is_refused_in_words(name: str) -> None:
    assert "torch computes what may differ" in refused(tiny_model(name))


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_so_is_a_backend_that_adds_up_by_the_batch(backend: str) -> None:
    said = refused(loaded("bfloat16", None), attention_backend=backend)
    assert backend in said


def test_gradual_changes_of_a_model_are_seen() -> None:
    """A layer that its owner has put in later is looked at, too."""
    model = tiny_model("llama")

    class Own(torch.nn.Linear):
        """Another kind, which has no stand-in."""

    with LLM(model, batch_invariant=True, kv_cache_memory_bytes="4MiB") as llm:
        greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        (before,) = llm.generate([[3, 4, 5]], greedy)
        old = model.model.layers[0].mlp.down_proj
        new = Own(old.in_features, old.out_features, bias=False)
        new.weight = old.weight
        model.model.layers[0].mlp.down_proj = new
        assert before.token_ids
        (after,) = llm.generate([[3, 4, 5]], greedy)
        assert after.finish_reason == "error"
        assert "batch_invariant" in after.detail
