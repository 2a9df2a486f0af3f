"""A request that goes on after tokens of another engine gives what one engine would have given."""

from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.engine.outputs import TextDelta
from quire.engine.request_maker import RequestMaker
from quire.engine.sequence import Request
from quire.errors import RequestError, RequestTooLong
from quire.models.loader import load
from quire.sampling_params import BeamSearchParams, PoolingParams, StructuredOutputsParams

PROMPT = "def fibonacci(n):\n    "
OPTIONS: dict[str, Any] = dict(kv_cache_memory_bytes="16MiB", max_model_len=128, seed=7)
CASES: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0),
    "seeded": dict(seed=3, top_p=0.95),
    "penalties": dict(
        temperature=0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4
    ),
    "min_tokens": dict(seed=11, temperature=1.5, min_tokens=12, stop_token_ids=tuple(range(200))),
    "stop": dict(temperature=0, stop=("return n", "\n\n", "n <= 1:\n")),
    "stop included": dict(temperature=0, stop=("return",), include_stop_str_in_output=True),
    "stop exempt": dict(temperature=0, stop=("n", ":"), min_tokens=9),
    "logprobs": dict(temperature=0, logprobs=3),
    "bad words": dict(temperature=0, bad_words=("return n", "if")),
    "ignore_eos": dict(seed=2, temperature=2.0, ignore_eos=True),
    "bias": dict(seed=4, logit_bias={5: 3.0, 9: -100.0}),
    "regex": dict(
        seed=5, structured_outputs=StructuredOutputsParams(regex=r"(漢|é|n){5}, [0-9]{2}")
    ),
    "choice": dict(
        temperature=0, structured_outputs=StructuredOutputsParams(choice=("yes, of course", "no"))
    ),
}


@cache
def engine(place: str) -> LLM:
    """One engine each at two places, of models that were loaded apart."""
    return LLM(load(dtype="float32"), **OPTIONS)


def deltas_of(llm: LLM, request: Request) -> list[TextDelta]:
    found: list[TextDelta] = []
    llm.start(request, found.append)
    while llm.step():
        pass
    return found


def tokens_of(deltas: list[TextDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def check_each_part(params: SamplingParams, parts: list[int] | None = None) -> None:
    """The first k tokens by one engine and the rest by another, for each k or some."""
    one, other = engine("here"), engine("there")
    whole = deltas_of(one, one.request(PROMPT, params))
    token_ids, last = tokens_of(whole), whole[-1]
    for k in range(1, len(token_ids) + 1) if parts is None else sorted(set(parts)):
        k = min(k, len(token_ids))
        begun = tuple(token_ids[:k])
        rest = deltas_of(other, other.request(PROMPT, params, output_token_ids=begun))
        assert tokens_of(rest) == token_ids[k:], k
        assert text_of(whole[:k]) + text_of(rest) == text_of(whole), k
        end = rest[-1]
        assert (end.finish_reason, end.stopped_by) == (last.finish_reason, last.stopped_by), k
        assert [each.finish_reason for each in rest[:-1]] == [None] * (len(rest) - 1), k
        ours = [each for delta in whole[k:] for each in delta.logprobs]
        theirs = [each for delta in rest for each in delta.logprobs]
        assert [each.token_id for each in theirs] == [each.token_id for each in ours], k
        for one_of, same in zip(theirs, ours, strict=True):
            assert one_of.logprob == pytest.approx(same.logprob, abs=1e-3)
    assert not other.usage().num_sequences


@pytest.mark.parametrize("name", CASES)
def test_the_rest_of_a_text_is_the_same(name: str) -> None:
    check_each_part(SamplingParams(max_tokens=14, **CASES[name]))


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    parts=st.lists(st.integers(1, 24), min_size=1, max_size=3),
    params=st.fixed_dictionaries(
        {"max_tokens": st.integers(1, 24), "seed": st.integers(0, 99)},
        optional={
            "temperature": st.sampled_from([0.0, 0.7, 1.5]),
            "top_k": st.sampled_from([0, 1, 5]),
            "min_p": st.sampled_from([0.0, 0.1]),
            "repetition_penalty": st.sampled_from([1.0, 1.2]),
            "frequency_penalty": st.sampled_from([0.0, 0.5]),
            "stop": st.lists(st.sampled_from(["\n", "re", " n", "if n", ")"]), max_size=2),
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "ignore_eos": st.booleans(),
            "logprobs": st.sampled_from([None, 2]),
        },
    ),
    min_part=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_whatever_the_parameters(parts: list[int], params: dict[str, Any], min_part: float) -> None:
    least = int(min_part * params["max_tokens"])
    check_each_part(SamplingParams(min_tokens=least, **params), parts)


def test_what_was_generated_before_is_no_prompt() -> None:
    one, other = engine("here"), engine("there")
    params = SamplingParams(max_tokens=30, temperature=0)
    begun = tuple(tokens_of(deltas_of(one, one.request(PROMPT, params)))[:25])
    other.reset_prefix_cache()
    prompt = other.request(PROMPT, params).prompt_token_ids
    before = other.statistics.num_generation_tokens
    for found in (0, None):  # the second one finds the whole in the cache
        rest = deltas_of(other, other.request(PROMPT, params, output_token_ids=begun))
        assert len(tokens_of(rest)) == 5
        assert rest[-1].num_cached_tokens == (len(prompt) if found is None else found)
    assert other.statistics.num_generation_tokens - before == 10
    assert other.statistics.generation_tokens.counts[-1] == 0
    assert other.statistics.prefill_tokens.sum >= 0


def test_a_request_may_be_run_twice() -> None:
    """What is known of its text is copied for each run."""
    one, other = engine("here"), engine("there")
    params = SamplingParams(max_tokens=12, temperature=0)
    whole = deltas_of(one, one.request(PROMPT, params))
    request = other.request(PROMPT, params, output_token_ids=tuple(tokens_of(whole)[:5]))
    assert text_of(deltas_of(other, request)) == text_of(deltas_of(other, request))


def test_prompt_logprobs_come_again_with_the_first_piece() -> None:
    one, other = engine("here"), engine("there")
    params = SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=1)
    whole = deltas_of(one, one.request(PROMPT, params))
    begun = tuple(tokens_of(whole)[:3])
    rest = deltas_of(other, other.request(PROMPT, params, output_token_ids=begun))
    assert tokens_of(rest) == tokens_of(whole)[3:]
    assert len(rest[0].prompt_logprobs) == len(whole[0].prompt_logprobs) > 0


def test_what_cannot_go_on_is_refused() -> None:
    llm = engine("here")
    maker = RequestMaker(llm.facts)  # as a process without an engine has it
    regex = StructuredOutputsParams(regex="[0-9]{4}")
    (letter,) = llm.request("a", SamplingParams()).prompt_token_ids[-1:]
    wrong: list[tuple[Any, tuple[int, ...], str]] = [
        (SamplingParams(n=2), (5,), "n=1"),
        (BeamSearchParams(beam_width=2), (5,), "no beam search"),
        (PoolingParams(), (5,), "embedding"),
        (SamplingParams(), (10**6,), "1000000 is not in the vocabulary"),
        (SamplingParams(), (-1,), "-1 is not in the vocabulary"),
        (SamplingParams(max_tokens=2), (5, 6, 7), "max_tokens=2"),
        (SamplingParams(structured_outputs=regex), (letter,), "number 0 does not follow"),
        (SamplingParams(max_tokens=500), (5,) * 300, "context ends at 128"),
    ]
    for params, begun, said in wrong:
        for make in (llm.request, maker.make):
            with pytest.raises(RequestError, match=said):
                make("a", params, output_token_ids=begun)


def test_a_process_without_an_engine_refuses_as_the_engine_does() -> None:
    llm = engine("here")
    maker = RequestMaker(llm.facts)
    wrong: list[tuple[Any, Any]] = [
        ("", None),
        ([10**6], None),
        (b"a", None),
        ([5] * 128, None),
        ("a", SamplingParams(logit_bias={10**6: 1.0})),
        ("a", SamplingParams(allowed_token_ids=(10**6,))),
        ("a\ud800", None),
        ("a", PoolingParams(dimensions=10**6)),
        ("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))),
    ]
    for prompt, params in wrong:
        errors = []
        for make in (llm.request, maker.make):
            with pytest.raises(RequestError) as caught:
                make(prompt, params)
            errors.append((type(caught.value), str(caught.value)))
        assert errors[0] == errors[1]
    with pytest.raises(RequestTooLong):
        maker.make([5] * 128)
