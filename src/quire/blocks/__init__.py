"""Ids: blocks and ranges, who holds them, and which are free. No tensors, no torch.

``coordinator`` is where to begin reading: everything else is what it is made of.
"""

from quire.blocks.ceiling import Ceiling
from quire.blocks.changes import Change, Commit, Copy, Map, Release, Unmap
from quire.blocks.coordinator import Coordinator
from quire.blocks.eviction import DEFAULT_POLICY, POLICIES, EvictionPolicy
from quire.blocks.hits import PrefixHit, Shortfall, no_hit, start_of
from quire.blocks.peaks import peak_bytes, verdict_on_length
from quire.blocks.pools import PoolSize
from quire.blocks.prefix_cache import TokenIds
from quire.blocks.prefix_index import BlockKey
from quire.blocks.prefix_keys import NO_KEYS, Image, PrefixKeys
from quire.blocks.ranges import FirstFit
from quire.blocks.steps import check_window
from quire.blocks.tables import BlockTables
from quire.blocks.usage import contents, used_tokens
from quire.blocks.verdicts import FITS, Fits, Never, NotNow, Verdict

__all__ = [
    "DEFAULT_POLICY",
    "FITS",
    "NO_KEYS",
    "POLICIES",
    "BlockKey",
    "BlockTables",
    "Ceiling",
    "Change",
    "Commit",
    "Coordinator",
    "Copy",
    "EvictionPolicy",
    "FirstFit",
    "Fits",
    "Image",
    "Map",
    "Never",
    "NotNow",
    "PoolSize",
    "PrefixHit",
    "PrefixKeys",
    "Release",
    "Shortfall",
    "TokenIds",
    "Unmap",
    "Verdict",
    "check_window",
    "contents",
    "no_hit",
    "peak_bytes",
    "start_of",
    "used_tokens",
    "verdict_on_length",
]
