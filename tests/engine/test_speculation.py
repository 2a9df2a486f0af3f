"""Guessing ahead changes how many steps a text takes, and nothing else."""

from functools import cache
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from conformance.covering import in_turn, only
from conformance.sharing_model import SHARING_KINDS, groups_of
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.config import EngineConfig
from quire.engine.outputs import CompletionOutput
from quire.engine.scheduler import Scheduler, SchedulerLimits
from quire.engine.sequence import Request, Sequence
from quire.engine.speculation.draft_length import DraftLength, num_alike
from quire.engine.speculation.draft_model import DraftModel
from quire.engine.speculation.prompt_lookup import PromptLookup, Repetitions
from quire.engine.step_plan import Sampled
from quire.errors import ConfigError, MemoryUnavailable
from quire.kv import STRATEGIES, CacheConfig, Usage
from quire.kv.paged import PagedAccounting
from quire.memory import CountedMemory, HostMemory
from quire.models.loader import LoadedModel, load
from tiny import tiny_model, tokens

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.2, seed=3, ignore_eos=True)
GAP = 1e-4  # two logits closer than that may change places where a step is computed otherwise


@cache
def model_of(name: str, seed: int = 0) -> PreTrainedModel:
    return tiny_model(name, seed=seed)


@cache
def nearly(name: str) -> PreTrainedModel:
    """A draft model that is right often, not always: the target with a little noise."""
    model = tiny_model(name)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * parameter.std() * torch.randn_like(parameter))
    return model


@cache
def demo() -> LoadedModel:
    return load()


def prompts() -> list[list[int]]:
    """Three that repeat themselves, one that does not."""
    texts = [tokens(1, length, seed=length)[0].tolist() for length in (5, 11, 17, 33)]
    return [(text * 8)[:40] for text in texts[:3]] + texts[3:]


def small(name: str = "llama", **options: Any) -> LLM:
    defaults = dict(max_model_len=96, kv_cache_memory_bytes="64MB", max_num_seqs=8)
    return LLM(model_of(name), **{**defaults, **options})


def ids(completions: list[CompletionOutput]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@cache
def wanted(name: str, params: SamplingParams) -> list[tuple[int, ...]]:
    with small(name) as llm:
        return ids(llm.generate(prompts(), params))


def assert_same(name: str, got: list[tuple[int, ...]], want: list[tuple[int, ...]]) -> None:
    """Up to the first place, if any, where the two likeliest tokens are as good as equal."""
    for prompt, ours, theirs in zip(prompts(), got, want, strict=True):
        assert len(ours) == len(theirs)
        differing = [i for i, pair in enumerate(zip(ours, theirs, strict=True)) if len({*pair}) > 1]
        if differing:
            text = torch.tensor([[*prompt, *theirs[: differing[0]]]])
            with torch.inference_mode():
                first, second = model_of(name)(text).logits[0, -1].topk(2).values.tolist()
            assert first - second < GAP, f"another token at {differing[0]}"


def speculative(how: str, name: str) -> dict[str, Any]:
    if how == "ngram":
        return NGRAM
    return {"model": nearly(name), "num_speculative_tokens": 4}


# -- what is said, is the same --------------------------------------------------------------------


EACH = [("llama", strategy) for strategy in STRATEGIES] + [("gemma3", "paged")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("each", "how"), in_turn([*EACH, ("deepseek_v3", "virtual")], ["ngram", "draft_model"])
)
def test_greedy_texts_are_the_same_in_fewer_steps(each: tuple[str, str], how: str) -> None:
    name, strategy = each
    steps: list[int] = []
    with small(name, cache=strategy, speculative_config=speculative(how, name)) as llm:
        got = ids(llm.generate(prompts(), GREEDY, observe=lambda _: steps.append(1)))
        scheduler = llm.engine.scheduler
        assert_same(name, got, wanted(name, GREEDY))
        assert 0 < scheduler.statistics.num_accepted_tokens <= scheduler.statistics.num_draft_tokens
        assert scheduler.statistics.num_accepted_tokens <= 4 * GREEDY.max_tokens - 4
        assert llm.usage().num_sequences == 0
    if how == "draft_model":
        assert len(steps) < GREEDY.max_tokens


@pytest.mark.parametrize("how", ["ngram", "draft_model"])
@pytest.mark.parametrize("strategy", only(STRATEGIES, "growing"))
def test_a_seed_draws_the_same_text(strategy: str, how: str) -> None:
    with small(cache=strategy, speculative_config=speculative(how, "llama")) as llm:
        assert ids(llm.generate(prompts(), SEEDED)) == wanted("llama", SEEDED)
        assert llm.statistics.num_accepted_tokens > 0
    assert wanted("llama", SEEDED) != wanted("llama", GREEDY)


@pytest.mark.parametrize(
    ("each", "how"), in_turn(EACH, ["ngram", "draft_model"], kept=[*EACH[1:3], EACH[4]])
)
def test_who_makes_room_goes_on_with_the_same_text(each: tuple[str, str], how: str) -> None:
    """Where memory is short for all, and one more is preempted every fifth step."""
    name, strategy = each
    options: dict[str, Any] = dict(cache=strategy, growth_tokens=16, block_size=4)
    config = speculative(how, name)
    with small(name, **options, speculative_config=config) as llm:
        llm.generate(prompts(), GREEDY)
        peak = llm.memory.peak_committed_bytes
    if strategy != "contiguous":  # whose sequences, one after the other, have none to preempt
        options["kv_cache_memory_bytes"] = peak // (2 if how == "ngram" else 1)
    with small(name, **options, speculative_config=config) as llm:
        scheduler, steps = llm.engine.scheduler, count()

        def observe(_: Usage) -> None:
            scheduler.check()
            if next(steps) % 5 == 4:
                scheduler.preempt_youngest(spare_oldest=True)

        for params in (GREEDY, SEEDED):
            got = ids(llm.generate(prompts(), params, observe=observe))
            assert_same(name, got, wanted(name, params))
        assert scheduler.num_preemptions > 0


def test_several_choices_and_logprobs_come_with_guesses_too() -> None:
    params = SamplingParams(
        n=3, max_tokens=16, temperature=0.2, seed=1, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    with small() as llm:
        want = llm.generate(prompts(), params)
    for how in ("ngram", "draft_model"):
        with small(speculative_config=speculative(how, "llama")) as llm:
            got = llm.generate(prompts(), params)
            assert llm.statistics.num_accepted_tokens > 0
        for ours, theirs in zip(got, want, strict=True):
            assert len(ours.prompt_logprobs) == len(theirs.prompt_logprobs)
            for choice, other in zip(ours.choices, theirs.choices, strict=True):
                assert choice.token_ids == other.token_ids
                assert [p.token_id for p in choice.logprobs] == list(choice.token_ids)
                logprobs = [[p.logprob for p in c.logprobs] for c in (choice, other)]
                assert np.allclose(*logprobs, atol=1e-3)


def test_a_text_ends_where_it_would_although_more_was_guessed() -> None:
    prompt = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n\n\n" * 2
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(demo(), max_num_seqs=2) as llm:
        (free,) = llm.generate(prompt, params)
    with LLM(demo(), max_num_seqs=2, speculative_config=NGRAM) as llm:
        for length in (1, 2, 7, 24):
            params = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True)
            assert ids(llm.generate(prompt, params)) == [free.token_ids[:length]]
        for at in (5, 18):
            stopped = SamplingParams(
                max_tokens=24, temperature=0, ignore_eos=True, stop=free.text[at : at + 3]
            )
            (completion,) = llm.generate(prompt, stopped)
            assert completion.text == free.text[: free.text.find(free.text[at : at + 3])]
            assert completion.finish_reason == "stop"
            stop_ids = SamplingParams(
                max_tokens=24, temperature=0, ignore_eos=True, stop_token_ids=(free.token_ids[at],)
            )
            (completion,) = llm.generate(prompt, stop_ids)
            end = free.token_ids.index(free.token_ids[at]) + 1
            assert completion.token_ids == free.token_ids[:end]
        assert llm.statistics.num_accepted_tokens > 0
        assert llm.usage().num_sequences == 0


def test_guesses_keep_to_a_grammar() -> None:
    """A guess that the grammar forbids is not taken, from whichever source."""
    pytest.importorskip("llguidance")
    grammar = StructuredOutputsParams(regex=r"(ab[0-9]){4,12}")
    params = SamplingParams(max_tokens=24, temperature=0, structured_outputs=grammar)
    options: dict[str, Any] = dict(max_num_seqs=2, max_model_len=128)
    with LLM(demo(), **options) as llm:
        (free,) = llm.generate("ab1ab1ab1xx ab1ab1ab1xx ", params)
    with LLM(demo(), **options, speculative_config=NGRAM) as llm:
        assert ids(llm.generate("ab1ab1ab1xx ab1ab1ab1xx ", params)) == [free.token_ids]
        assert llm.statistics.num_accepted_tokens > 0


# -- what a step makes of guesses -----------------------------------------------------------------


@settings(max_examples=50)
@given(data=st.data())
def test_no_sequence_makes_room_for_a_guess(data: st.DataObject) -> None:
    """Right and wrong guesses at random, over a pool that is too small for all.

    The texts are given, so that they must come out as they are.
    """
    groups = groups_of(data.draw(st.sampled_from(SHARING_KINDS)))
    token_bytes = sum(group.bytes_per_token for group in groups)
    accounting = PagedAccounting(
        groups,
        CacheConfig(
            max_model_len=40,
            max_num_seqs=4,
            capacity_bytes=token_bytes * data.draw(st.integers(48, 120)),
            block_size=data.draw(st.sampled_from([2, 4])),
            page_bytes=128,
            enable_prefix_caching=data.draw(st.booleans()),
        ),
    )
    budget = data.draw(st.integers(2, 24))
    scheduler = Scheduler(
        accounting, SchedulerLimits(max_model_len=40, max_num_seqs=4, max_num_batched_tokens=budget)
    )
    random = data.draw(st.randoms(use_true_random=False))
    sequences: list[Sequence] = []
    for index in range(data.draw(st.integers(1, 5))):
        params = SamplingParams(max_tokens=random.randint(1, 20), ignore_eos=True)
        prompt = tuple(random.randrange(5) for _ in range(random.randint(1, 15)))
        sequences += scheduler.add(
            Request(request_id=index, prompt_token_ids=prompt, params=params)
        )
    texts = {s.seq_id: [random.randrange(5) for _ in range(60)] for s in sequences}

    def rest(sequence: Sequence) -> list[int]:
        return texts[sequence.seq_id][sequence.num_output_tokens :]

    while scheduler.has_unfinished:
        proposed = {
            s.seq_id: tuple(
                token if random.random() < 0.7 else 7 for token in rest(s)[: random.randint(1, 6)]
            )
            for s in scheduler.decoding
            if random.random() < 0.8
        }
        lost = scheduler.num_preemptions
        plan = scheduler.plan(proposed)
        accounting.drain()
        assert plan.num_tokens <= budget
        for chunk in plan.chunks:
            assert chunk.drafts == proposed.get(chunk.sequence.seq_id, ())[: len(chunk.drafts)]
            assert not (chunk.drafts and scheduler.num_preemptions > lost)
        sampled: list[Sampled] = []
        for draw in plan.draws:
            came = rest(draw.sequence)
            num_right = num_alike(draw.drafts, came)
            sampled.append(Sampled(token_ids=tuple(came[: num_right + 1])))
        scheduler.update(plan, sampled)
        accounting.drain()
        scheduler.check()
    assert accounting.usage().num_sequences == 0
    for sequence in sequences:
        if sequence.finish_reason == "length":
            whole = texts[sequence.seq_id][: sequence.request.params.max_tokens]
            assert sequence.output_token_ids == whole
        else:
            assert sequence.finish_reason == "capacity"


def test_guesses_take_no_turn_from_what_is_certain() -> None:
    """Four decode with a budget of five: one token is left for a guess."""
    groups = groups_of(SHARING_KINDS[0])
    config = CacheConfig(max_model_len=64, max_num_seqs=4, capacity_bytes=2**20, page_bytes=128)
    accounting = PagedAccounting(groups, config)
    scheduler = Scheduler(
        accounting, SchedulerLimits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=5)
    )
    for index in range(4):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        scheduler.add(Request(request_id=index, prompt_token_ids=(index,), params=params))
    plan = scheduler.plan()
    scheduler.update(plan, [Sampled(token_ids=(1,))] * 4)
    plan = scheduler.plan({s.seq_id: (1, 1, 1) for s in scheduler.decoding})
    assert sorted(len(chunk.drafts) for chunk in plan.chunks) == [0, 0, 0, 1]
    scheduler.update(plan, [Sampled(token_ids=(1,))] * 4)
    counted = scheduler.statistics
    assert (counted.num_draft_tokens, counted.num_accepted_tokens) == (1, 0)


# -- looking up -----------------------------------------------------------------------------------


def slow_continuation(
    text: list[int], shortest: int, longest: int, num_tokens: int
) -> tuple[int, ...]:
    """All places compared, by definition."""
    places = [
        place
        for place in range(len(text) - 1, shortest - 1, -1)
        if text[place - shortest : place] == text[len(text) - shortest :]
    ][:16]

    def length(place: int) -> int:
        most = min(longest, place)
        alike = range(shortest, most + 1)
        return max(n for n in alike if text[place - n : place] == text[len(text) - n :])

    if not places:
        return ()
    best = max(places, key=lambda place: (length(place), place))
    whole = list(text)
    for index in range(num_tokens):
        whole.append(whole[best + index])
    return tuple(whole[len(text) :])


@given(
    text=st.lists(st.integers(0, 2), max_size=80),
    cuts=st.lists(st.integers(0, 80), max_size=5),
    shortest=st.integers(1, 3),
    more=st.integers(0, 4),
    num_tokens=st.integers(1, 12),
)
def test_a_continuation_is_that_of_the_longest_latest_match(
    text: list[int], cuts: list[int], shortest: int, more: int, num_tokens: int
) -> None:
    repetitions = Repetitions(shortest, shortest + more)
    for end in [*sorted(min(cut, len(text)) for cut in cuts), len(text)]:
        repetitions.extend(text[:end])
        got = repetitions.continuation(text[:end], num_tokens)
        assert got == slow_continuation(text[:end], shortest, shortest + more, num_tokens)


def of_tokens(token_ids: list[int]) -> Sequence:
    params = SamplingParams(max_tokens=10**6)
    request = Request(request_id=0, prompt_token_ids=tuple(token_ids), params=params)
    return Sequence(request, seq_id=0)


def test_a_text_without_repetition_costs_nothing() -> None:
    lookup = PromptLookup(most_tokens=8, shortest=2, longest=5)
    sequence = of_tokens([*range(50)])
    for token in range(50, 500):
        assert lookup.propose([sequence]) == {}
        sequence.token_ids.append(token)
    lookup.forget(sequence)
    lookup.forget(sequence)


def test_guesses_that_fail_become_rare_and_those_that_hold_long() -> None:
    pace, sequence = DraftLength(8), of_tokens([1])
    asked: list[int] = []
    for _ in range(400):
        asked.append(pace.num_tokens_due(sequence))
        if asked[-1]:
            pace.note(sequence, (2,) * asked[-1])
        sequence.token_ids.append(1)
    at = [step for step, num_tokens in enumerate(asked) if num_tokens]
    rests = [later - step - 1 for step, later in pairwise(at)]
    assert rests[:8] == [1, 2, 4, 8, 16, 32, 32, 32]
    assert sum(asked) == 1 + len(at)  # two tokens at first
    right: list[int] = []
    for _ in range(40):
        num_tokens = pace.num_tokens_due(sequence)
        if num_tokens:
            right.append(num_tokens)
            pace.note(sequence, (1,) * num_tokens)
        sequence.token_ids += [1] * (num_tokens + 1)
    assert right[:5] == [1, 2, 4, 8, 8]


@given(st.lists(st.tuples(st.lists(st.booleans(), max_size=9), st.integers(0, 9)), max_size=60))
def test_a_pace_never_asks_for_more_than_it_may(steps: list[tuple[list[bool], int]]) -> None:
    """Whatever holds, and however many tokens come: guesses need not have been computed."""
    pace, sequence = DraftLength(6), of_tokens([1])
    for holds, num_coming in steps:
        num_tokens = pace.num_tokens_due(sequence)
        assert 0 <= num_tokens <= 6
        guess = tuple(1 if right else 2 for right in holds)[:num_tokens]
        if guess:
            pace.note(sequence, guess)
        sequence.token_ids += [1] * num_coming


# -- a draft model --------------------------------------------------------------------------------


def drafter_of(llm: LLM) -> DraftModel:
    drafter = llm.engine.drafter
    assert isinstance(drafter, DraftModel)
    return drafter


def test_a_draft_model_that_is_the_model_is_always_right() -> None:
    config = {"model": model_of("llama"), "num_speculative_tokens": 4}
    with small(speculative_config=config) as llm:
        got = ids(llm.generate(prompts(), GREEDY))
        scheduler = llm.engine.scheduler
        assert (
            scheduler.statistics.num_accepted_tokens == scheduler.statistics.num_draft_tokens > 60
        )
    assert_same("llama", got, wanted("llama", GREEDY))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_draft_model_holds_what_runs_and_gives_back_what_ends(name: str) -> None:
    """A window of its own is followed too, and long prompts come in parts."""
    config = {"model": nearly(name), "num_speculative_tokens": 4}
    memory = CountedMemory(HostMemory())
    options: dict[str, Any] = dict(max_num_batched_tokens=16, block_size=4, provider=memory)
    with small(name, speculative_config=config, **options) as llm:
        stream = llm.stream(prompts(), GREEDY)
        seen = [(next(stream), drafter_of(llm).memory.committed_bytes)[1] for _ in range(60)]
        assert max(seen) > 0
        assert llm.statistics.num_accepted_tokens > 0
        stream.close()
        assert drafter_of(llm).memory.committed_bytes == 0
        assert_same(name, ids(llm.generate(prompts(), GREEDY)), wanted(name, GREEDY))
        assert drafter_of(llm).memory.committed_bytes == 0
        assert drafter_of(llm).memory.peak_committed_bytes + llm.memory.peak_committed_bytes <= (
            64 * 10**6
        )
    assert memory.committed_bytes == memory.reserved_bytes == 0


def test_who_is_preempted_is_dropped_by_the_draft_model() -> None:
    config = {"model": model_of("llama"), "num_speculative_tokens": 4}
    with small(speculative_config=config) as llm:
        stream = llm.stream(prompts(), GREEDY)
        for _ in range(20):
            next(stream)
        before = drafter_of(llm).memory.committed_bytes
        while llm.engine.scheduler.preempt_youngest(spare_oldest=True):
            pass
        drafter_of(llm).propose(llm.engine.scheduler.decoding)
        assert 0 < drafter_of(llm).memory.committed_bytes < before
        list(stream)
        assert drafter_of(llm).memory.committed_bytes == 0


@pytest.mark.parametrize("num_tokens", [8, 48, 100])
def test_who_finds_no_room_gets_no_guesses(num_tokens: int) -> None:
    """The draft model's part holds a few tokens, a sequence, or not all of them."""
    with small(speculative_config={"model": model_of("llama")}) as llm:
        drafter = drafter_of(llm)
        drafter._kv.accounting.resize(num_tokens * llm.spec.bytes_per_token)
        assert_same("llama", ids(llm.generate(prompts(), GREEDY)), wanted("llama", GREEDY))
        num_guesses = llm.statistics.num_draft_tokens
    assert (num_guesses > 0) == (num_tokens >= 48)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_draft_model_that_fails_costs_only_its_guesses(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    with small(speculative_config={"model": model_of("llama")}) as llm:
        drafter = drafter_of(llm)
        run, calls = drafter._runner.run, iter(range(10**6))

        def fail(plan: Any) -> Any:
            if next(calls) == at:
                raise RuntimeError("out of order")
            return run(plan)

        monkeypatch.setattr(drafter._runner, "run", fail)
        assert_same("llama", ids(llm.generate(prompts(), GREEDY)), wanted("llama", GREEDY))
        assert next(calls) == at + 1, "it rests after a failure"
        assert drafter.memory.committed_bytes == 0


@pytest.mark.parametrize("for_good", [False, True])
def test_a_draft_model_without_pages_makes_no_guesses(
    monkeypatch: pytest.MonkeyPatch, for_good: bool
) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryUnavailable("no pages")

    with small(speculative_config={"model": model_of("llama")}) as llm:
        drafter = drafter_of(llm)
        monkeypatch.setattr(drafter._kv.storage, "apply", refuse)
        if for_good:
            monkeypatch.setattr(drafter._kv, "_make", refuse)
        assert_same("llama", ids(llm.generate(prompts(), GREEDY)), wanted("llama", GREEDY))
        assert llm.statistics.num_draft_tokens == 0
        assert drafter.memory.committed_bytes == 0


def test_a_draft_model_of_another_vocabulary_is_refused() -> None:
    config = model_of("llama").config.__class__(**model_of("llama").config.to_dict())
    config.vocab_size = 150
    other = type(model_of("llama"))(config).eval()
    with pytest.raises(ConfigError, match=r"another vocabulary.*: 150 tokens, not 199"):
        small(speculative_config={"model": other})


def test_the_budget_is_for_both_models() -> None:
    """As many tokens in each; the draft model's weights are in the ledger."""
    with small(speculative_config={"model": model_of("gemma3")}) as llm, small() as alone:
        both = llm.elastic.capacity_bytes + drafter_of(llm)._kv.accounting.ceiling.capacity_bytes
        assert both == alone.elastic.capacity_bytes
        assert llm.ledger.require() == alone.ledger.require()


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_config", "message"),
    [
        ("x", "speculative_config 'x' is not JSON"),
        ("[1]", "must be a JSON object"),
        (7, "speculative_config=7 must be a JSON object"),
        ({"metod": "ngram"}, "unknown 'metod'; did you mean 'method'"),
        ({"method": "eagle"}, "method 'eagle' is unknown; known: ngram, draft_model"),
        ({"method": "draft_model"}, "method draft_model needs a model"),
        ({"method": "ngram", "model": "x"}, "method ngram takes no model"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 must be from 1 to 64"),
        ({"num_speculative_tokens": "4"}, "num_speculative_tokens='4' must be a whole number"),
        ({"prompt_lookup_min": 6}, "prompt_lookup_max=5 must be from 6"),
        ({"model": 5}, "a folder, a hub name or a Transformers model, not int"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(given_config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small(speculative_config=given_config)


def test_options_come_as_json_or_as_a_mapping() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 5}'
    assert EngineConfig.from_options(speculative_config=text) == EngineConfig(
        speculative_config=NGRAM
    )
    assert EngineConfig().speculative_config is None
    parsed = EngineConfig(speculative_config={"model": "folder"}).speculative_config
    assert parsed is not None
    assert (parsed.method, parsed.num_speculative_tokens) == ("draft_model", 4)
