"""A batch-invariant text is the same to the bit, whatever else is in the batch and on the way.

Random schedules (``engine.schedules``) in several dtypes, also with small weights: each token of
each sequence, and the logarithms of its likeliest tokens' probabilities, must be those that the
prompt gets alone, whole in one chunk, in another engine. Not one may differ.

The whole: pytest tests/engine/test_batch_invariant.py -m 'full or not full'
"""

from collections import deque
from collections.abc import Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch

from conformance.covering import only
from engine.schedules import LONGEST_OUTPUT, Result, Schedule, prompts
from quire import LLM, SamplingParams
from quire.engine import build
from quire.engine.outputs import TextDelta
from quire.engine.sequence import Sequence
from quire.engine.step_plan import TokenLogprobs
from quire.errors import ConfigError
from quire.kv import STRATEGIES
from quire.models.loader import load
from quire.models.recorded import recordings
from tiny import VOCAB, tiny_model


class Form(NamedTuple):
    """What a model is computed in. Other models than the demo's are tiny, with random weights."""

    model: str
    dtype: str
    quantization: str | None = None
    kv_cache_dtype: str = "auto"


FORMS = (
    Form("demo", "bfloat16"),
    Form("mistral", "bfloat16"),  # a window
    Form("demo", "bfloat16", "int4", "int8_per_token_head"),
    Form("gemma2", "float16"),  # a softcap, and windows
    Form("demo", "float32"),
    Form("gemma3", "bfloat16"),
    Form("demo", "bfloat16", "int8"),
    Form("qwen3", "bfloat16", None, "fp8"),
    Form("demo", "float32", "int4-g128-asym", "fp8"),
    Form("llama", "float32"),
)
Found = tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]


@cache
def loaded(form: Form) -> Any:
    if form.model == "demo":
        return load(dtype=form.dtype, quantization=form.quantization)
    return tiny_model(form.model).to(getattr(torch, form.dtype))


def prompt_of(form: Form, which: int) -> list[int]:
    own = prompts()[which]
    return list(own) if form.model == "demo" else [3 + token % (VOCAB - 3) for token in own]


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


engines: dict[Form, LLM] = {}  # for one sequence at a time


def engine_of(form: Form) -> LLM:
    if form not in engines:
        engines[form] = LLM(
            loaded(form),
            batch_invariant=True,
            kv_cache_dtype=form.kv_cache_dtype,
            kv_cache_memory_bytes="2MiB",
            max_model_len=128,
            max_num_seqs=1,
            enable_prefix_caching=False,
        )
    return engines[form]


@cache
def alone(form: Form, which: int) -> Found:
    """Of a prompt by itself: it in one chunk, then token after token."""
    params = params_of(which, LONGEST_OUTPUT)
    (done,) = engine_of(form).generate([prompt_of(form, which)], params)
    return done.token_ids, done.choices[0].logprobs


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    for llm in engines.values():
        llm.close()
    engines.clear()
    alone.cache_clear()


class InvariantSchedule(Schedule):
    """Of a form. What is not as it should be is a fault."""

    def __init__(self, seed: int, form: Form, *, is_invariant: bool = True) -> None:
        super().__init__(seed)
        self.form, self.loaded = form, partial(loaded, form)
        self.options |= {
            "batch_invariant": is_invariant,
            "kv_cache_dtype": form.kv_cache_dtype,
            "block_size": self.rng.choice([4, 16, 32]),
            "enforce_eager": self.rng.random() < 0.3,
        }

    def prompt(self, which: int) -> tuple[int, ...]:
        return tuple(prompt_of(self.form, which))

    def params(self, which: int) -> SamplingParams:
        return params_of(which, self.rng.randint(4, LONGEST_OUTPUT))

    def compare(self, which: int, sequence: Sequence, result: Result) -> None:
        result.num_sequences += 1
        result.num_cached_tokens += sequence.num_cached_tokens
        want = list(alone(self.form, which)[0])
        self.require(sequence.output_token_ids == want[: sequence.num_output_tokens], which, result)

    def compare_deltas(self, which: int, deltas: deque[TextDelta], result: Result) -> None:
        told = tuple(each for delta in deltas for each in delta.logprobs)
        self.require(told == alone(self.form, which)[1][: len(told)], which, result)

    def require(self, is_same: bool, which: int, result: Result) -> None:
        if not is_same:
            result.faults.append(f"seed {self.seed}, {self.form}, {self.options}: prompt {which}")


def run(seeds: range, form: Form, waves: int = 1) -> Result:
    total = Result()
    for seed in seeds:
        total.add(InvariantSchedule(seed, form).run(waves))
    assert not total.faults
    return total


@pytest.fixture(autouse=True)
def _recorded_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that steps of all kinds are played, and some are not."""
    monkeypatch.setattr(recordings, "WORTH_IT", 3)


@pytest.mark.parametrize("number", only(range(len(FORMS)), 2, 3))
def test_random_schedules(number: int) -> None:
    assert run(range(number, number + 1), FORMS[number]).num_sequences


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form)))
def test_a_thousand_schedules(form: Form) -> None:
    """A hundred of each form: ten engines, to each of which requests come in ten waves."""
    total = run(range(10), form, waves=10)
    assert total.num_preemptions > 50
    assert total.num_cached_tokens > 500
    print(total)


def test_without_the_option_some_differ() -> None:
    """Else the tests above would say nothing."""
    usual = (InvariantSchedule(seed, FORMS[1], is_invariant=False) for seed in range(8))
    assert any(schedule.run().faults for schedule in usual)


@pytest.mark.parametrize("cache", STRATEGIES.own_names)
def test_each_strategy_gives_the_same(cache: str) -> None:
    form, several = FORMS[0], [1, 6, 12]
    with LLM(
        loaded(form),
        batch_invariant=True,
        cache=cache,
        kv_cache_memory_bytes="8MiB",
        max_model_len=128,
    ) as llm:
        done = llm.generate(
            [prompt_of(form, which) for which in several],
            [params_of(which, LONGEST_OUTPUT) for which in several],
        )
    for which, each in zip(several, done, strict=True):
        assert (each.token_ids, each.choices[0].logprobs) == alone(form, which)


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
    said = refused(loaded(FORMS[0]), attention_backend=backend)
    assert backend in said


def test_ranks_are_refused_before_any_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parts are loaded for minutes."""
    monkeypatch.setattr(build, "load_parts", lambda *_, **__: pytest.fail("parts were loaded"))
    said = refused(None, tensor_parallel_size=2)
    assert "batch_invariant needs tensor_parallel_size=1, and it is 2" in said


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
