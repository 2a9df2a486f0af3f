"""``Evidence``: what eviction policies of several pools tell each other of the orders they tried.

Which order of eviction finds more is a property of the traffic, and a fleet's replicas see the same
traffic, a part each. So what one has found out need not be found out by each. It is a hint and a
bounded loan, since it comes from outside: what a policy does with it costs little if it is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one pool's policy has found by trying orders, or those of ``num_pools`` in the mean.

    It can be pickled. The figures are by order, as the policy numbers them.
    """

    policy: str  # whose orders they are
    block_tokens: int
    num_blocks: int  # of the pool
    num_pools: int = 1
    accounts: tuple[float, ...]  # what trials have found beyond LRU, less what they lost: blocks
    promises: tuple[float, ...]  # what shadow caches have found lately

    def is_like(self, other: "Evidence") -> bool:
        """Return whether it is of the same orders in a pool of about the same size."""
        larger = max(self.num_blocks, other.num_blocks)
        return (
            self.policy == other.policy
            and self.block_tokens == other.block_tokens
            and 8 * abs(self.num_blocks - other.num_blocks) <= larger
        )


@runtime_checkable
class SharesEvidence(Protocol):
    """What an eviction policy may have besides: it learns from those of other pools."""

    def evidence(self) -> Evidence | None:
        """Return what this one has found; None if it tries nothing."""
        ...

    def hear(self, others: Evidence | None) -> None:
        """Take what others have found, in place of what was heard before; None: nothing.

        Any thread may call. What cannot be is taken for the nearest that can.
        """
        ...


@runtime_checkable
class EvidenceSource(Protocol):
    """What accounting does besides where its pools have eviction policies."""

    def evidence(self) -> tuple[Evidence | None, ...]:
        """Return what each group's policy has found. Any thread may call."""
        ...

    def hear_evidence(self, others: Sequence[Evidence | None]) -> None:
        """Tell each group's policy what others have found. Any thread may call."""
        ...


def mean_evidence(own: Evidence, others: Sequence[Evidence]) -> Evidence | None:
    """Return the mean of those ``others`` that are like ``own``; None if there are none.

    What one of them says of how many pools it speaks for is not believed.
    """
    alike = [each for each in others if each.is_like(own)]
    if not alike:
        return None
    return Evidence(
        policy=own.policy,
        block_tokens=own.block_tokens,
        num_blocks=own.num_blocks,
        num_pools=len(alike),
        accounts=_means([each.accounts for each in alike]),
        promises=_means([each.promises for each in alike]),
    )


def _means(several: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the mean by order, of the orders that all have figures for."""
    return tuple(sum(each) / len(several) for each in zip(*several, strict=False))
