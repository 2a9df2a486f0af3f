"""Prompts through the engine's own accounting, under any of its eviction policies.

A request is instantaneous: what is cached of its prompt is found and held, room is made for the
rest, all of it is known to be computed, and all of it is let go. A block is a block of one token
here, and its number is the token: the core does what it does in an engine, only that the bytes of a
block's token ids are not hashed and compared with it.
"""

import numpy as np

from quire.kv import Fits
from quire.kv.interface import CacheConfig
from quire.kv.paged import PagedAccounting
from quire.planner.hit_rates.prompts import TELL_EVERY, OnRequest, Prompts
from quire.spec import FullAttention, Group


def core_hits(
    prompts: Prompts,
    num_blocks: int,
    policy: str,
    on_request: OnRequest = lambda _: None,
    *,
    first_counted: int = 0,
) -> int:
    """Tokens found in a cache of so many blocks; a larger prompt is refused.

    Raises: ConfigError for an unknown policy.
    """
    accounting = prefix_accounting(num_blocks, policy, longest=num_blocks)
    # A hit leaves at least one token to compute, so each prompt gets a last token of its own.
    own = prompts.num_blocks
    hit_tokens = 0
    for request in range(prompts.num_requests):
        chain = prompts.chain(request)
        if len(chain) > num_blocks:
            continue
        accounting.add(request)
        asked = np.append(chain, np.int32(own + request))
        hit = accounting.match_prefix(request, asked)
        verdict = accounting.try_extend(request, len(chain), hit=hit)
        assert isinstance(verdict, Fits), f"{len(chain)} of {num_blocks} blocks do not fit"
        if hit.num_tokens < len(chain):
            rest = chain[hit.num_tokens :]
            accounting.mark_computed([request], [len(rest)], rest)
        accounting.free(request)
        accounting.drain()
        if request >= first_counted:
            hit_tokens += prompts.tokens_of(request, hit.num_tokens)
        if request % TELL_EVERY == 0:
            on_request(request)
    return hit_tokens


def prefix_accounting(num_blocks: int, policy: str, *, longest: int) -> PagedAccounting:
    """A prefix cache of so many blocks of one token; prompts have up to ``longest``, and one."""
    group = Group(
        spec=FullAttention(num_kv_heads=1, head_dim=1, dtype="float8_e4m3fn"), layers=(0,)
    )
    config = CacheConfig(
        max_model_len=1 + longest,
        max_num_seqs=1,
        capacity_bytes=num_blocks * group.bytes_per_token,
        block_size=1,
        page_bytes=1,
        eviction_policy=policy,
    )
    return PagedAccounting((group,), config)
