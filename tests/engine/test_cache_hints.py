"""What clients know reaches the cache: what is to be kept, and which conversations have ended."""

from dataclasses import replace

import pytest

from quire import LLM, CacheRetention, SamplingParams
from quire.errors import RequestError
from quire.kv import STRATEGIES, PrefixKeys
from quire.kv.retention import RetainedBlocks
from tiny import CONFIGS, random_model

BLOCK = 4
PROMPT = tuple(range(1, 18))  # four blocks, and a token
GREEDY = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
OPTIONS = dict(max_model_len=64, max_num_seqs=2, block_size=BLOCK)


def keeping(*retentions: CacheRetention) -> SamplingParams:
    return replace(GREEDY, cache_hint=retentions)


def flood(llm: LLM) -> None:
    """Prompts that do not come again, more than the cache holds."""
    for at in range(24):
        llm.generate([[20 + at, *range(100, 132)]], GREEDY)


def test_a_prompt_that_is_to_be_kept_is_found_after_a_flood_until_its_time_is_over() -> None:
    now_s = 0.0
    with LLM(random_model(CONFIGS["llama"]()), kv_cache_memory_bytes=2**16, **OPTIONS) as llm:
        llm.engine.clock = lambda: now_s
        want = llm.generate([PROMPT], keeping(CacheRetention(seconds=300)))[0]
        assert (want.num_cached_tokens, want.num_retained_tokens) == (0, 4 * BLOCK)
        flood(llm)
        now_s = 299.0
        again = llm.generate([PROMPT], keeping(CacheRetention(seconds=60, num_tokens=9)))[0]
        assert again.token_ids == want.token_ids
        assert (again.num_cached_tokens, again.num_retained_tokens) == (4 * BLOCK, 2 * BLOCK)
        now_s = 358.0  # what is behind the second mark has lapsed
        flood(llm)
        found = llm.generate([PROMPT], GREEDY)[0]
        assert (found.num_cached_tokens, found.num_retained_tokens) == (2 * BLOCK, 0)
        assert found.token_ids == want.token_ids
        now_s = 359.0
        flood(llm)
        assert llm.generate([PROMPT], GREEDY)[0].num_cached_tokens == 0


def test_how_much_is_kept_is_the_servers_choice() -> None:
    model = random_model(CONFIGS["llama"]())
    for share, kept in ((0.0, 0), (1.0, 4 * BLOCK)):
        with LLM(
            model, kv_cache_memory_bytes=2**16, prefix_caching_retention=share, **OPTIONS
        ) as llm:
            found = llm.generate([PROMPT], keeping(CacheRetention()))[0]
            assert found.num_retained_tokens == kept


@pytest.mark.parametrize("cache", [name for name in STRATEGIES if name != "paged"])
def test_every_strategy_takes_the_hint(cache: str) -> None:
    with LLM(random_model(CONFIGS["llama"]()), cache=cache, **OPTIONS) as llm:
        found = llm.generate([PROMPT], replace(keeping(CacheRetention()), n=2))[0]
        shares = llm.generate([PROMPT], GREEDY)[0].num_cached_tokens > 0
        assert found.num_retained_tokens == (4 * BLOCK if shares else 0)


def test_a_client_that_hangs_up_has_not_said_that_its_conversation_ends() -> None:
    said = list[bool]()
    with LLM(random_model(CONFIGS["llama"]()), **OPTIONS) as llm:
        free = llm.accounting.free

        def noting(seq_id: int, *, forget: bool = False, ended: bool = False) -> None:
            said.append(ended)
            free(seq_id, forget=forget, ended=ended)

        llm.accounting.free = noting  # type: ignore[method-assign]
        ends = replace(GREEDY, cache_hint="ends", max_tokens=30)
        pieces = llm.stream([PROMPT], ends)
        next(pieces)
        pieces.close()
        assert said == [False]
        llm.generate([PROMPT], ends)
        assert said == [False, True]
        assert not isinstance(llm.accounting.pools[0].evictable, RetainedBlocks)


def test_salts_make_no_other_client_of_one() -> None:
    with LLM(random_model(CONFIGS["llama"]()), **OPTIONS) as llm:
        for salt in ("a", "b"):
            keys = PrefixKeys(tenant="t", salt=salt)
            llm.start(llm.request(PROMPT, keeping(CacheRetention()), keys=keys), lambda _: None)
            while llm.step():
                pass
        policy = llm.accounting.pools[0].evictable
        assert isinstance(policy, RetainedBlocks)
        assert {name: each.num_blocks for name, each in policy._owners.items()} == {"t": 8}


def test_a_retention_out_of_its_limits_is_refused_by_name() -> None:
    for name, values in {
        "seconds": [0, -1, 86_401, float("nan"), "x", True],
        "num_tokens": [0, 1.5, "x", True],
    }.items():
        for value in values:
            with pytest.raises(RequestError, match=rf"^{name}=.* must be "):
                CacheRetention(**{name: value})
