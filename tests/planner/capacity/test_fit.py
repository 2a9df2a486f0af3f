"""What would have to change: each answer fits, and one more would not."""

from __future__ import annotations

import pytest

from conformance.covering import only
from planner.places import GIB, card, host, planned
from quire.planner.capacity import CapacityPlan
from quire.planner.fit import changes, longest, most_sequences


def again(found: CapacityPlan, **options: object) -> CapacityPlan:
    said = {"max_num_seqs": found.config.max_num_seqs, "budget": found.config.budget}
    return planned(found.subject, found.place, request=found.request, **{**said, **options})


@pytest.mark.parametrize("budget", only(["auto", "vllm", "llamacpp"], "auto"))
def test_the_longest_context_fits_and_one_token_more_does_not(budget: str) -> None:
    found = planned("Qwen2.5-14B", card("l40s"), budget=budget)
    tokens = longest(found)
    assert 1250 < tokens < 131_072
    assert again(found, max_model_len=tokens).fits
    assert not again(found, max_model_len=tokens + 1).fits


def test_a_context_for_several_at_once_is_shorter() -> None:
    found = planned("Llama-3.1-8B", card("h100"), max_num_seqs=16)
    one, many = longest(found), longest(found, 16)
    assert one == 131_072
    assert again(found, max_model_len=many).cell.num_longest >= 16
    assert again(found, max_model_len=many + 16).cell.num_longest < 16


def test_the_most_sequences_fit_and_one_more_does_not() -> None:
    found = planned("Llama-3.1-8B", card("h100"), max_model_len=8192)
    count = most_sequences(found)
    assert count > found.config.max_num_seqs
    with_them = again(found, max_model_len=8192, max_num_seqs=count)
    assert with_them.cell.num_sequences == count
    one_more = again(found, max_model_len=8192, max_num_seqs=count + 1)
    assert one_more.cell.num_sequences < count + 1


def test_what_does_not_fit_comes_with_what_would() -> None:
    found = planned("Llama-3.3-70B-Instruct", card("h100"))
    assert not found.fits
    assert found.ledger.refusal is not None
    flags = {change.flag.split()[0]: change for change in changes(found)}
    assert set(flags) == {"--memory", "--tp"}  # no context is short enough: weights alone
    ranks = int(flags["--tp"].flag.split()[1])
    assert planned(found.subject, found.place, num_ranks=ranks).fits
    assert not planned(found.subject, found.place, num_ranks=ranks // 2).fits
    size = int(flags["--memory"].flag.split()[1].removesuffix("GiB"))
    assert planned(found.subject, host(size * GIB)).fits


def test_a_long_context_may_be_shortened_or_kept_in_fewer_bits() -> None:
    found = planned("Qwen2.5-14B", card("l40s"), budget="vllm")
    assert found.ledger.refusal is None
    assert not found.fits
    would = list(changes(found))
    assert f"--max-model-len {longest(found)}" in [change.flag for change in would]
    for change in would:
        option, value = change.flag.removeprefix("--").split()
        if option == "max-model-len":
            assert again(found, max_model_len=int(value)).fits
        if option == "kv-cache-dtype":
            assert again(found, kv_cache_dtype=value).fits
        if option == "tp":
            assert planned(found.subject, found.place, num_ranks=int(value), budget="vllm").fits


def test_nothing_fits_where_not_even_the_weights_do() -> None:
    found = planned("DeepSeek-V3", card("l4"))
    assert longest(found) == 0
    assert most_sequences(found) == 0
