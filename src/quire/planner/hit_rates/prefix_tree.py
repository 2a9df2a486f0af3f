"""Which prompts of a trace begin alike: a tree of stretches of blocks, and where each prompt ends.

A stretch is a run of blocks that no prompt leaves or enters in the middle, so that its blocks are
always used together; a prompt is a path of stretches from the root. To follow prompts is to look at
stretches, of which there are few, not at blocks. Ids need not stand for all before them: equal ids
are one block where all before them are equal too.

A block's number is its stretch's first number and its place in there.
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
OnRequest: TypeAlias = Callable[[int], None]  # told how many requests are done, now and then
TELL_EVERY: Final = 256
_ID_BYTES: Final = 8
_ROOT: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Prompts in order of time.

    Shapes: R requests, S stretches.
    """

    block_tokens: int
    prompt_tokens: list[int]  # [R]
    ends: list[int]  # [R] the last stretch of each prompt; -1: it has no block
    parents: list[int]  # [S] -1: it begins a prompt
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
        """Distinct ones."""
        return sum(self.lengths)

    def path(self, request: int) -> list[int]:
        """A prompt's stretches, from the first on."""
        stretch, parents = self.ends[request], self.parents
        path = []
        while stretch != _ROOT:
            path.append(stretch)
            stretch = parents[stretch]
        path.reverse()
        return path

    def num_blocks_of_each(self) -> list[int]:
        """Of each prompt. Shapes: [R]."""
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
        """A prompt's blocks, from the first on."""
        parts = [
            np.arange(self.firsts[each], self.firsts[each] + self.lengths[each], dtype=np.int32)
            for each in self.path(request)
        ]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)

    def last_tokens(self, request: int, num_blocks: int) -> int:
        """What the last block of a prompt of so many holds: mostly it is not full."""
        whole = (num_blocks - 1) * self.block_tokens
        return min(self.block_tokens, self.prompt_tokens[request] - whole)

    def tokens_of(self, request: int, num_blocks: int) -> int:
        """The prompt's tokens that its first ``num_blocks`` hold."""
        return min(num_blocks * self.block_tokens, self.prompt_tokens[request])


def prompts_of(
    trace: Iterable[TraceRequest], *, block_tokens: int | None = None, whole_blocks: bool = False
) -> Prompts:
    """Read a trace to its end.

    ``block_tokens``: join so many tokens' ids to a block; None: an id is a block. ``whole_blocks``:
    the end of a prompt that fills no block is not kept, as in an engine; else it is a block of its
    own, as in the traces' own figures.

    Raises: ConfigError.
    """
    tree = _Tree()
    prompt_tokens, ends = array("q"), array("q")
    joined: dict[bytes, int] = {}
    id_tokens = 0
    for request in trace:
        prompt_tokens.append(request.input_tokens)
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
        raise ConfigError("a trace without requests has no hit rate")
    if not id_tokens:
        raise ConfigError(
            "this trace does not say which prompts begin alike (no hash_ids), so that nothing can "
            "be said of its hit rate; Mooncake's, Bailian's, kv-cache-tester's and Quire's own do"
        )
    lengths = [len(label) // _ID_BYTES for label in tree.labels]
    return Prompts(
        block_tokens=block_tokens or id_tokens,
        prompt_tokens=prompt_tokens.tolist(),
        ends=ends.tolist(),
        parents=tree.parents,
        lengths=lengths,
        firsts=np.cumsum([0, *lengths], dtype=np.int64)[:-1],
    )


def _check_sizes(before: int, id_tokens: int, block_tokens: int | None) -> None:
    if before:
        raise ConfigError(f"hash ids of {before:,} and of {id_tokens:,} tokens in one trace")
    if block_tokens is not None and (block_tokens < 1 or block_tokens % id_tokens):
        raise ConfigError(
            f"--block-size {block_tokens}: the trace's hash ids stand for {id_tokens:,} tokens "
            f"each, so that blocks are of these or of a multiple"
        )


def _joined(data: bytes, size: int, known: dict[bytes, int]) -> bytes:
    """Each ``size`` bytes of ids as one id; the rest as one too."""
    several = array("q")
    for start in range(0, len(data), size):
        part = data[start : start + size]
        several.append(known.setdefault(part, len(known)))
    return several.tobytes()


@final
class _Tree:
    """Stretches as prompts come; one that a prompt leaves in the middle is cut there."""

    def __init__(self) -> None:
        self.labels: list[bytes] = []  # the ids of each stretch
        self.parents: list[int] = []
        self._children: dict[tuple[int, bytes], int] = {}  # by the first id

    def enter(self, data: bytes) -> int:
        """The stretch that a prompt of these ids ends with."""
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
            # The lower part keeps its number: prompts end with it.
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
    """How many bytes of whole ids are alike; they are not all alike to the label's end."""
    count = min(len(data) - at, len(label)) // _ID_BYTES
    ours = np.frombuffer(data, np.int64, count, at)
    theirs = np.frombuffer(label, np.int64, count)
    differ = np.flatnonzero(ours != theirs)
    return _ID_BYTES * (int(differ[0]) if len(differ) else count)
