"""Sampling parameters: each out of its limits is refused by name; the rest is kept as it is."""

import math
from typing import Any

import pytest
from transformers import AutoTokenizer

from quire import CacheRetention, SamplingParams
from quire.engine.llm import LLM
from quire.engine.prompts import bad_word_ids
from quire.errors import RequestError
from quire.spec.model_files import find_folder
from tiny import VOCAB, tiny_model


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "n": [0, -1, 1.0, None, True],
        "max_tokens": [0, 1.5, None, True],
        "min_tokens": [-1, 17, 1.0, None],
        "temperature": [-0.1, math.inf, math.nan, "1", None, True],
        "top_k": [-2, 2.0, None],
        "top_p": [0, 1.01, math.nan, None],
        "min_p": [-0.1, 1.1, None],
        "repetition_penalty": [0, -1, 1e-7, 1e7, math.inf, math.nan, None],
        "presence_penalty": [-2.1, 2.1, math.nan, None],
        "frequency_penalty": [-2.1, 2.1, math.nan, None],
        "logit_bias": [[1], {1: 101}, {1: math.nan}, {-1: 0}, {"1": 1}, {1: "x"}],
        "logprobs": [-2, 1.5, True, "all"],
        "prompt_logprobs": [-2, 1.5, True],
        "seed": ["x", 1.5, True],
        "stop": [("",), "", ("a", 3), None, 7],
        "stop_token_ids": [[-1], ["a"], 5, None, [True]],
        "bad_words": [[""], "", None, [3]],
        "structured_outputs": [{"regex": "a"}, "a"],
        "cache_hint": ["", "end", True, ["ends"], ("ends",), (CacheRetention(),) * 5],
    }.items(),
)
def test_a_parameter_out_of_its_limits_is_refused_by_name(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=rf"^{name}=.* must be "):
            SamplingParams(**{name: value})


def test_the_limits_themselves_are_allowed() -> None:
    for name, values in {
        "min_tokens": [0, 16],
        "temperature": [0, 1e-300, 100.0],
        "top_k": [-1, 0, 10**9],
        "top_p": [1e-9, 1],
        "min_p": [0, 1],
        "presence_penalty": [-2, 2],
        "logit_bias": [{0: -100, 5: 100}, {}, None],
        "logprobs": [-1, 0, None],
        "seed": [-(2**70), None],
        "cache_hint": ["ends", None, CacheRetention(), (CacheRetention(),) * 4, ()],
    }.items():
        for value in values:
            assert getattr(SamplingParams(**{name: value}), name) == value


def test_several_are_kept_as_tuples() -> None:
    assert SamplingParams(stop="ab", bad_words="c").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"], bad_words=["d"]).bad_words == ("d",)
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


def test_what_was_given_may_change_afterwards() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[2] = 3.0
    assert dict(params.logit_bias or {}) == {1: 2.0}


# -- in tokens ------------------------------------------------------------------------------------


class Words:
    """A tokenizer that keeps a space with the word after it, if it knows both together."""

    known = ("a", " a", "b", "ab", " ", "c", " cd", "cd")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        ids = []
        while text:
            word = max((w for w in self.known if text.startswith(w)), key=len)
            ids.append(self.known.index(word))
            text = text[len(word) :]
        return ids


def test_bad_words_are_barred_with_and_without_a_space_before() -> None:
    """As vLLM does: the spaced one counts if it is as many tokens, beginning with another."""
    found = bad_word_ids(("a", "b", "cd", " ab", "aab"), Words(), 8)
    a, a_spaced, b, ab, _, _, cd_spaced, cd = range(8)
    assert found == ((a,), (a_spaced,), (b,), (cd,), (cd_spaced,), (ab,), (a, ab), (a_spaced, ab))
    with pytest.raises(RequestError, match="bad_words: ' ' has no tokens"):
        bad_word_ids((" ",), Words(), 8)
    with pytest.raises(RequestError, match="token id 7 is not in the vocabulary: it ends at 6"):
        bad_word_ids(("cd",), Words(), 7)


def test_the_demo_models_words_are_found() -> None:
    tokenizer = AutoTokenizer.from_pretrained(find_folder(None))
    for word in ("return", " return", "self.name"):
        found = bad_word_ids((word,), tokenizer, len(tokenizer))
        assert tokenizer.decode(found[0]) == word.lstrip()
        assert all(tokenizer.decode(ids).strip() == word.lstrip() for ids in found)


def test_ids_and_words_that_the_model_does_not_have_are_refused() -> None:
    with LLM(tiny_model("llama"), max_model_len=32, kv_cache_memory_bytes="4MB") as llm:
        with pytest.raises(RequestError, match=f"logit_bias: token id {VOCAB} is not in"):
            llm.generate([1], SamplingParams(logit_bias={VOCAB: 1.0}))
        with pytest.raises(RequestError, match="no tokenizer: stop and bad_words"):
            llm.generate([1], SamplingParams(bad_words=["a"]))
        kept = SamplingParams(temperature=0, logit_bias={7: 100.0}, max_tokens=3)
        assert llm.generate([1], kept)[0].token_ids == (7, 7, 7)
