"""Embeddings are Transformers' own last hidden states, whatever runs beside or interrupts."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BloomConfig, MambaConfig, PreTrainedModel

from quire import LLM, PoolingParams, SamplingParams
from quire.errors import RequestError, RequestTooLong
from readers import tiny_reader
from tiny import VOCAB, random_model, tiny_model, tokens

LENGTHS = (1, 5, 17, 33, 40)
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(
    max_model_len=128, max_num_seqs=4, kv_cache_memory_bytes="4MiB", max_num_batched_tokens=16
)
MODELS = {
    **{name: lambda name=name: tiny_model(name) for name in ("llama", "gemma2", "deepseek_v3")},
    "bloom": lambda: random_model(
        BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4)
    ),
    "mamba": lambda: random_model(
        MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
}
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in LENGTHS]


@cache
def model_of(name: str) -> PreTrainedModel:
    model: PreTrainedModel = MODELS[name]()
    return model


@cache
def expected(name: str) -> list[np.ndarray[Any, Any]]:
    """By Transformers, each prompt alone and whole; of the length 1."""
    with torch.inference_mode():
        states = [
            model_of(name).base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
            for prompt in PROMPTS
        ]
    return [torch.nn.functional.normalize(state, dim=0).numpy() for state in states]


def require_right(name: str, llm: LLM, prompts: list[list[int]] = PROMPTS) -> None:
    found = llm.embed(prompts)
    assert [list(each.prompt_token_ids) for each in found] == prompts
    for each, wanted in zip(found, expected(name), strict=True):
        assert each.embedding.dtype == np.float32
        np.testing.assert_allclose(each.embedding, wanted, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_they_are_the_models_own_last_hidden_states(name: str) -> None:
    with LLM(model_of(name), **OPTIONS) as llm:
        assert llm.attention_way == ("alone" if name == "bloom" else "table")
        require_right(name, llm)
        require_right(name, llm)  # with what the first time has left in the cache
        assert llm.usage().num_sequences == 0
        assert llm.reset_prefix_cache()
        assert llm.memory.committed_bytes == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        *({"cache": name} for name in ("contiguous", "growing", "virtual")),
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"kv_cache_memory_bytes": "48KiB", "swap_space": "1MiB"},  # one makes room for another
        {"kv_cache_dtype": "float32", "scheduling_policy": "shortest"},
    ],
    ids=str,
)
def test_what_runs_beside_gets_its_own(options: dict[str, Any]) -> None:
    """Texts and embeddings in the same steps, in each way to hold memory."""
    with LLM(model_of("llama"), **{**OPTIONS, **options}) as llm:
        repeated = [7, 8, 9, 7, 8, 9, 7, 8]
        alone = llm.generate([repeated, PROMPTS[2]], GREEDY)
        pieces = llm.stream([repeated, PROMPTS[2]], GREEDY)
        first = next(pieces)
        require_right("llama", llm)  # steps for the texts too
        rest = [first, *pieces]
        for index, completion in enumerate(alone):
            ids = [i for delta in rest if delta.index == index for i in delta.token_ids]
            assert tuple(ids) == completion.token_ids
        assert llm.statistics.num_finished["stop"] == len(PROMPTS)
        assert llm.statistics.num_generation_tokens == 4 * 12


def test_prefixes_are_found_and_left_for_texts() -> None:
    with LLM(model_of("llama"), **OPTIONS) as llm:
        first, again = llm.embed([PROMPTS[3]])[0], llm.embed([PROMPTS[3]])[0]
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
        np.testing.assert_allclose(again.embedding, first.embedding, atol=1e-6)
        assert llm.generate([PROMPTS[3]], GREEDY)[0].num_cached_tokens == 32
        assert llm.statistics.num_prompt_tokens == 3 * 33
        assert llm.statistics.num_cached_prompt_tokens == 2 * 32


def test_admission_learns_no_length_from_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no output, and outputs of no token would let too many texts come."""
    told: list[int] = []
    note = "quire.engine.scheduling.admission.Admission.note_ended"
    monkeypatch.setattr(note, lambda _, num_tokens, reason: told.append(num_tokens))
    with LLM(model_of("llama"), **OPTIONS) as llm:
        llm.embed(PROMPTS[:2])
        llm.generate(PROMPTS[:1], GREEDY)
    assert told == [12]


def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    with LLM(model_of("llama"), **OPTIONS) as llm:
        assert len(llm.embed([[5] * 128])) == 1
        with pytest.raises(RequestTooLong, match=r"129 tokens and the context ends at 128: short"):
            llm.embed([[5] * 129])
        with pytest.raises(RequestTooLong, match="with at least one to generate"):
            llm.generate([[5] * 128])


def test_scores_are_cosines() -> None:
    with LLM(model_of("llama"), **OPTIONS) as llm:
        one, other, third = expected("llama")[1:4]
        a, b, c = PROMPTS[1:4]
        assert llm.score([a], [b, c]) == pytest.approx([one @ other, one @ third], abs=2e-5)
        assert llm.score([a, b], [b, b]) == pytest.approx([one @ other, 1], abs=2e-5)
        assert llm.score(a, a) == pytest.approx([1], abs=2e-5)
        with pytest.raises(RequestError, match=r"text_1 has 2 texts and text_2 3"):
            llm.score([a, b], [a, b, c])


def test_their_size_and_length_are_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    with LLM(model, **OPTIONS) as llm:
        raw = llm.embed([PROMPTS[1]], PoolingParams(normalize=False))[0].embedding
        np.testing.assert_allclose(raw / np.linalg.norm(raw), expected("llama")[1], atol=2e-5)
        assert abs(np.linalg.norm(raw) - 1) > 0.1
        assert len(llm.embed([[5]], PoolingParams(dimensions=64))[0].embedding) == 64
        with pytest.raises(RequestError, match=r"dimensions=32: .* have 64, .* leave dimensions"):
            llm.embed([[5]], PoolingParams(dimensions=32))
    for said, allowed, refused in (
        ({"is_matryoshka": True}, 7, 65),
        ({"matryoshka_dimensions": [16, 32]}, 16, 7),
    ):
        with monkeypatch.context() as patch:
            for name, value in said.items():
                patch.setattr(model.config, name, value, raising=False)
            with LLM(model, **OPTIONS) as llm:
                cut = llm.embed([PROMPTS[1]], PoolingParams(dimensions=allowed))[0].embedding
                np.testing.assert_allclose(
                    cut, raw[:allowed] / np.linalg.norm(raw[:allowed]), atol=2e-5
                )
                with pytest.raises(RequestError, match=f"dimensions={refused} must be one of"):
                    llm.embed([[5]], PoolingParams(dimensions=refused))
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(RequestError, match="dimensions="):
            PoolingParams(dimensions=wrong)  # type: ignore[arg-type]


def test_a_model_without_them_says_why() -> None:
    llm = LLM(tiny_reader("whisper"), kv_cache_memory_bytes="32MB", max_num_seqs=2)
    with llm, pytest.raises(RequestError, match=r"no embeddings: it is an encoder-decoder"):
        llm.embed([[5]])


def test_a_prompt_that_cannot_be_computed_ends_and_others_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LLM(model_of("llama"), **OPTIONS) as llm:
        runner: Any = llm.engine._runner
        own = runner.run

        def run(plan: Any) -> Any:
            logits = own(plan)
            for chunk in plan.chunks:
                if chunk.pools and chunk.sequence.token_ids == PROMPTS[1]:
                    chunk.sequence.embedding = np.full(64, np.nan, np.float32)
            return logits

        monkeypatch.setattr(runner, "run", run)
        with pytest.raises(RequestError, match=r"without an embedding: .* not all finite numbers"):
            llm.embed([PROMPTS[1]])
        assert llm.statistics.num_corrupted == 1
        assert len(llm.embed([PROMPTS[2]])) == 1
        assert llm.reset_prefix_cache()
