"""``Offers``: blocks of prompts that another server is to load, on their way out of the cache.

A prompt whose request asks for it is offered as soon as it is computed: memory is leased for its
blocks, and they are copied out between steps, before all that tiers keep. What is evicted first, or
finds no room in staging memory, the other server computes.
"""

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Protocol, final

from quire.engine.sequence import RemoteBlocks, Sequence
from quire.kv.interface import ExternalBlocks
from quire.kv.prefix_index import NO_BLOCK, BlockIdentity

_SHARE_OF_A_STEP = 0.5  # of its time, that copying offers may take beside it: a peer waits for them


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Memory for the records of a prompt's first blocks."""

    name: str
    num_blocks: int
    params: Mapping[str, object]  # what the answer says of it, without the number of tokens


class BlockTransfer(Protocol):
    """Hands blocks to other servers and takes theirs. No call waits for one."""

    def lease(self, groups: Several[Several[int]]) -> Lease | None:
        """Reserve memory for blocks, of each in these groups. Return None if there is no room."""
        ...

    def copy_leased(self, group: int, block: int, identity: BlockIdentity, lease: str) -> bool:
        """Copy a block to staging memory, for a lease. Return False if there is no room now."""
        ...

    def skip(self, group: int, lease: str) -> None:
        """Note that a block does not come that memory was leased for."""
        ...

    def least_wait_s(self, remote: RemoteBlocks | None) -> float:
        """Return the seconds that a sequence waits for what peers have left, at the least.

        0: there is nothing of theirs, or it waits no longer than computing takes.
        """
        ...

    def release_remote(self, remote: RemoteBlocks) -> None:
        """Tell a peer, at some time, that its blocks are not needed any more."""
        ...

    def end_leases(self) -> None:
        """End all leases: their records are not what they say."""
        ...


@final
class Offers:
    """The offers of one engine. Its calls are made between two steps, by the engine's thread."""

    def __init__(self, transfer: BlockTransfer, clock: Callable[[], float]) -> None:
        self._transfer, self._clock = transfer, clock
        self._queue: deque[tuple[int, list[int], str]] = deque()  # node, groups, lease
        self.num_offered = self.num_lost = 0  # blocks

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, sequence: Sequence, blocks: ExternalBlocks) -> None:
        """Offer the full blocks of a sequence's prompt, which is computed."""
        index = blocks.index
        sequence.kv_transfer_params = {}
        most = sequence.num_prompt_tokens // index.block_size
        nodes = blocks.computed_nodes(sequence.seq_id)[:most]
        rows = [index.row(node) for node in nodes]
        groups = [
            [number for number, own in enumerate(index.blocks) if own[row] != NO_BLOCK]
            for row in rows
        ]
        lease = self._transfer.lease(groups) if nodes else None
        if lease is None:
            return
        count = lease.num_blocks
        self.num_offered += count
        self._queue += (
            (node, own, lease.name) for node, own in zip(nodes[:count], groups[:count], strict=True)
        )
        num_tokens = count * index.block_size
        sequence.kv_transfer_params = {**lease.params, "remote_num_tokens": num_tokens}

    def copy_out(self, blocks: ExternalBlocks, *, step_s: float | None) -> bool:
        """Copy offers out. Return False if there is no room for more now.

        ``step_s``: seconds of the step beside which this happens; None: no sequence runs.
        """
        index = blocks.index
        stop_s = None if step_s is None else self._clock() + _SHARE_OF_A_STEP * step_s
        while self._queue:
            node, groups, lease = self._queue[0]
            identity, row = index.identity(node), index.row(node)
            while groups:
                block = NO_BLOCK if identity is None else int(index.blocks[groups[0]][row])
                if identity is None or block == NO_BLOCK:  # it was evicted
                    self._transfer.skip(groups[0], lease)
                    self.num_lost += 1
                elif not self._transfer.copy_leased(groups[0], block, identity, lease):
                    return False
                groups.pop(0)
            self._queue.popleft()
            if stop_s is not None and self._clock() >= stop_s:
                break
        return True

    def forget_blocks(self) -> None:
        """Note that the cache is empty: what was to be copied out is lost."""
        for _, groups, lease in self._queue:
            for group in groups:
                self._transfer.skip(group, lease)
        self._queue.clear()

    def stop(self) -> None:
        """End all offers, and their leases."""
        self._queue.clear()
        self._transfer.end_leases()

    # -- of another server -------------------------------------------------------------------------

    def least_wait_s(self, remote: RemoteBlocks | None) -> float:
        """Return the seconds that a sequence waits for what peers have left, at the least."""
        return self._transfer.least_wait_s(remote)

    def forget(self, sequence: Sequence) -> None:
        """Note that a sequence needs no blocks of another server any more."""
        remote, sequence.remote = sequence.remote, None
        if remote is not None:
            self._transfer.release_remote(remote)
