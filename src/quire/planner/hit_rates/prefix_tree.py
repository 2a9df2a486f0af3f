"""Build the radix tree of a trace's prompts.

An edge of the tree is a stretch: a run of blocks in which no prompt begins to differ, so that its
blocks are always used together. A prompt is a path of stretches from the root. A trace has far
fewer stretches than blocks, which is what makes it fast to replay. Two equal hash ids are one block
if all ids before them are equal too.

A block's number is the first number of its stretch plus its place in the stretch.
"""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from quire.errors import ConfigError
from quire.traces import TraceRequest

Ints: TypeAlias = npt.NDArray[np.int64]
OnRequest: TypeAlias = Callable[[int], None]  # called from time to time: requests done
TELL_EVERY: Final = 256
_ID_BYTES: Final = 8
_ROOT: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The prompts of a trace in order of time, as paths in the tree.

    Shapes: R requests, S stretches.
    """

    block_tokens: int
    prompt_tokens: list[int]  # [R]
    at_s: list[float]  # [R] when each came
    ends: list[int]  # [R] the last stretch of each prompt; -1: the prompt has no block
    parents: list[int]  # [S] -1: the stretch begins at the root
    lengths: list[int]  # [S] in blocks
    firsts: Ints  # [S] number of the first block

    @property
    def num_requests(self) -> int:
        return len(self.ends)

    @property
    def num_tokens(self) -> int:
        return sum(self.prompt_tokens)

    @property
    def num_blocks(self) -> int:
        """Return the number of distinct blocks."""
        return sum(self.lengths)

    def path(self, request: int) -> list[int]:
        """Return a prompt's stretches, the first one first."""
        stretch, parents = self.ends[request], self.parents
        path = []
        while stretch != _ROOT:
            path.append(stretch)
            stretch = parents[stretch]
        path.reverse()
        return path

    def num_blocks_of_each(self) -> list[int]:
        """Return the number of blocks of each prompt. Shapes: [R]."""
        depths, found = {_ROOT: 0}, []
        for end in self.ends:
            below, stretch = [], end
            while stretch not in depths:
                below.append(stretch)
                stretch = self.parents[stretch]
            depth = depths[stretch]
            for each in reversed(below):
                depth = depths[each] = depth + self.lengths[each]
            found.append(depth)
        return found

    def chain(self, request: int) -> npt.NDArray[np.int32]:
        """Return the numbers of a prompt's blocks. Shapes: [blocks]."""
        parts = [
            np.arange(self.firsts[each], self.firsts[each] + self.lengths[each], dtype=np.int32)
            for each in self.path(request)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def last_tokens(self, request: int, num_blocks: int) -> int:
        """Return the tokens in the last block of a prompt of ``num_blocks``."""
        whole = (num_blocks - 1) * self.block_tokens
        return min(self.block_tokens, self.prompt_tokens[request] - whole)

    def tokens_of(self, request: int, num_blocks: int) -> int:
        """Return the prompt's tokens in its first ``num_blocks``."""
        return min(num_blocks * self.block_tokens, self.prompt_tokens[request])


def prompts_of(
    trace: Iterable[TraceRequest], *, block_tokens: int | None = None, whole_blocks: bool = False
) -> Prompts:
    """Read a trace to its end, and build the tree of its prompts.

    A block joins the hash ids of ``block_tokens`` tokens; by default it is one id. With
    ``whole_blocks`` the last block of a prompt counts only if it is full, as in an engine; without,
    it always counts, as in the published figures of traces.

    Raises: ConfigError.
    """
    tree = _Tree()
    prompt_tokens, ends, at_s = array("q"), array("q"), array("d")
    joined: dict[bytes, int] = {}
    id_tokens = 0
    for request in trace:
        prompt_tokens.append(request.input_tokens)
        at_s.append(request.at_s)
        ids = request.hash_ids
        if not ids:
            ends.append(_ROOT)
            continue
        if request.id_tokens != id_tokens:
            _check_sizes(id_tokens, request.id_tokens, block_tokens)
            id_tokens = request.id_tokens
        size = block_tokens or id_tokens
        data = array("q", ids).tobytes()
        if size != id_tokens:
            data = _joined(data, size // id_tokens * _ID_BYTES, joined)
        if whole_blocks:
            data = data[: request.input_tokens // size * _ID_BYTES]
        ends.append(tree.enter(data))
    if not len(ends):
        raise ConfigError("the trace has no requests")
    if not id_tokens:
        raise ConfigError(
            "the trace has no hash_ids, which a hit rate needs; Mooncake's, Bailian's, "
            "kv-cache-tester's and Quire's own traces have them"
        )
    lengths = [len(label) // _ID_BYTES for label in tree.labels]
    return Prompts(
        block_tokens=block_tokens or id_tokens,
        prompt_tokens=prompt_tokens.tolist(),
        at_s=at_s.tolist(),
        ends=ends.tolist(),
        parents=tree.parents,
        lengths=lengths,
        firsts=np.cumsum([0, *lengths], dtype=np.int64)[:-1],
    )


def _check_sizes(before: int, id_tokens: int, block_tokens: int | None) -> None:
    if before:
        raise ConfigError(f"the trace has hash ids of {before:,} and of {id_tokens:,} tokens")
    if block_tokens is not None and (block_tokens < 1 or block_tokens % id_tokens):
        raise ConfigError(
            f"--block-size {block_tokens} must be a multiple of {id_tokens:,}, the tokens of a "
            "hash id of the trace"
        )


def _joined(data: bytes, size: int, known: dict[bytes, int]) -> bytes:
    """Join each ``size`` bytes of ids, and the rest, to one id."""
    several = array("q")
    for start in range(0, len(data), size):
        part = data[start : start + size]
        several.append(known.setdefault(part, len(known)))
    return several.tobytes()


@final
class _Tree:
    """The tree while it grows; a prompt that differs inside a stretch splits it."""

    def __init__(self) -> None:
        self.labels: list[bytes] = []  # the ids of each stretch
        self.parents: list[int] = []
        self._children: dict[tuple[int, bytes], int] = {}  # by the first id

    def enter(self, data: bytes) -> int:
        """Add a prompt of these ids. Returns: its last stretch."""
        node, at = _ROOT, 0
        while at < len(data):
            key = (node, data[at : at + _ID_BYTES])
            child = self._children.get(key)
            if child is None:
                self._children[key] = len(self.labels)
                return self._add(node, data[at:])
            label = self.labels[child]
            if data.startswith(label, at):
                node, at = child, at + len(label)
                continue
            num_common = _num_common(data, at, label)
            # The lower part keeps its number, because prompts end with it.
            node = self._children[key] = self._add(node, label[:num_common])
            self.labels[child], self.parents[child] = label[num_common:], node
            self._children[node, label[num_common : num_common + _ID_BYTES]] = child
            at += num_common
        return node

    def _add(self, parent: int, label: bytes) -> int:
        self.labels.append(label)
        self.parents.append(parent)
        return len(self.labels) - 1


def _num_common(data: bytes, at: int, label: bytes) -> int:
    """Count the bytes of whole ids that agree; the label does not agree to its end."""
    count = min(len(data) - at, len(label)) // _ID_BYTES
    ours = np.frombuffer(data, np.int64, count, at)
    theirs = np.frombuffer(label, np.int64, count)
    differ = np.flatnonzero(ours != theirs)
    return _ID_BYTES * (int(differ[0]) if len(differ) else count)
