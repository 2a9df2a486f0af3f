"""The prefix index against a dictionary of tuples: a prefix is its extras and all its token ids."""

from typing import TypeAlias

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from conformance.covering import examples
from quire.kv.prefix_index import NO_BLOCK, Extra, PrefixIndex

SIZE = 2
Block: TypeAlias = tuple[tuple[int, ...], Extra]
Path: TypeAlias = tuple[Extra, tuple[Block, ...]]  # extras of the root, and the blocks so far

ROOTS: list[Extra] = [(), (("salt", "a"),)]
TOKENS = st.sampled_from([(0, 0), (0, 1), (1, 0), (1, 1), (0, 256)])
EXTRAS: st.SearchStrategy[Extra] = st.sampled_from([(), (), (), (("image", "cat@0"),)])


def data(tokens: tuple[int, ...]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


class IndexMachine(RuleBasedStateMachine):
    """Sequences are paths; blocks are numbers that nodes hold."""

    @initialize(num_groups=st.integers(1, 2))
    def build(self, num_groups: int) -> None:
        self.index = PrefixIndex(num_groups, SIZE, keep_events=True)
        self.num_groups = num_groups
        self.tips: list[tuple[int, Path]] = []  # of each sequence: node, and what it stands for
        self.blocks: list[dict[Path, int]] = [{} for _ in range(num_groups)]
        self.nodes: dict[Path, int] = {}
        self.seen: dict[int, Path] = {}  # each id ever, and what it stood for
        self.hashes: dict[Path, bytes] = {}
        self.outside: list[dict[bytes, tuple[int, ...]]] = [{} for _ in range(num_groups)]
        self.num_blocks = 0

    # -- the model -------------------------------------------------------------------------------

    def alive(self) -> set[Path]:
        """What something needs, and the ancestors of that."""
        needed = {path for _, path in self.tips} | {p for each in self.blocks for p in each}
        return {(root, blocks[:end]) for root, blocks in needed for end in range(len(blocks) + 1)}

    def named(self, path: Path, node: int) -> int:
        assert self.seen.setdefault(node, path) == path, "an id was used again"
        self.nodes[path] = node
        return node

    def draw(self, draw: st.DataObject, of: list[Path]) -> list[Path]:
        chosen: list[Path] = draw.draw(st.lists(st.sampled_from(of), unique=True)) if of else []
        return chosen

    # -- rules -----------------------------------------------------------------------------------

    @precondition(lambda self: len(self.tips) < 6)
    @rule(root=st.sampled_from(ROOTS))
    def begin(self, root: Extra) -> None:
        path: Path = (root, ())
        self.tips.append((self.named(path, self.index.root(root)), path))

    @precondition(lambda self: self.tips)
    @rule(at=st.integers(0, 5), blocks=st.lists(st.tuples(TOKENS, EXTRAS), min_size=1, max_size=4))
    def advance(self, at: int, blocks: list[Block]) -> None:
        at %= len(self.tips)
        node, (root, before) = self.tips[at]
        for tokens, extra in blocks:
            path = (root, (*before, (tokens, extra)))
            known = path in self.alive()
            node, is_new = self.index.advance(node, data(tokens), extra)
            assert is_new == (not known)
            self.named(path, node)
            before = path[1]
            self.tips[at] = (node, path)

    @precondition(lambda self: self.tips)
    @rule(at=st.integers(0, 5), several=st.lists(TOKENS, min_size=1, max_size=4))
    def descend(self, at: int, several: list[tuple[int, ...]]) -> None:
        at %= len(self.tips)
        node, (root, before) = self.tips[at]
        paths = [
            (root, (*before, *((tokens, ()) for tokens in several[: count + 1])))
            for count in range(len(several))
        ]
        alive = self.alive()
        num_known = sum(path in alive for path in paths)
        nodes, found = self.index.descend(node, b"".join(map(data, several)))
        assert found == num_known
        for path, each in zip(paths, nodes, strict=True):
            self.named(path, each)
        self.tips[at] = (nodes[-1], paths[-1])

    @precondition(lambda self: self.tips and len(self.tips) < 6)
    @rule(at=st.integers(0, 5))
    def fork(self, at: int) -> None:
        node, path = self.tips[at % len(self.tips)]
        self.index.incref(node)
        self.tips.append((node, path))

    @precondition(lambda self: self.tips)
    @rule(at=st.integers(0, 5))
    def end(self, at: int) -> None:
        node, _ = self.tips.pop(at % len(self.tips))
        self.index.decref(node)

    @rule(draw=st.data(), group=st.integers(0, 1))
    def attach(self, draw: st.DataObject, group: int) -> None:
        group %= self.num_groups
        lacking = [p for p in self.alive() if p[1] and p not in self.blocks[group]]
        paths = self.draw(draw, sorted(lacking, key=repr))
        new = list(range(self.num_blocks, self.num_blocks + len(paths)))
        self.num_blocks += len(paths)
        rows = self.index.rows(self.nodes[path] for path in paths)
        self.index.attach(group, rows, np.array(new, np.intp))
        self.blocks[group] |= dict(zip(paths, new, strict=True))

    @rule(draw=st.data(), group=st.integers(0, 1))
    def detach(self, draw: st.DataObject, group: int) -> None:
        group %= self.num_groups
        paths = self.draw(draw, sorted(self.blocks[group], key=repr))
        rows = self.index.rows(self.nodes[path] for path in paths)
        self.index.detach(group, rows)
        for path in paths:
            del self.blocks[group][path]

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        alive = self.alive()
        assert len(self.index) == len(alive)
        for root, blocks in alive:
            if blocks and (root, ()) in alive:
                tokens = b"".join(data(block[0]) for block in blocks)
                extras = tuple(block[1] for block in blocks)
                found = self.index.walk(self.nodes[root, ()], tokens, extras)
                wanted = [self.nodes[root, blocks[: end + 1]] for end in range(len(blocks))]
                assert found == wanted
        for path in alive:
            row = self.index.row(self.nodes[path])
            for group, known in enumerate(self.blocks):
                assert self.index.blocks[group][row] == known.get(path, NO_BLOCK)
            digest = self.index.block_hash(row)
            assert self.hashes.setdefault(path, digest) == digest, "the same content, another hash"
        assert len(set(self.hashes.values())) == len(self.hashes), "one hash for two contents"

    @invariant()
    def nothing_else_is_found(self) -> None:
        """Each node's children are those that are alive, and no others."""
        if not hasattr(self, "index"):
            return
        alive = self.alive()
        for root, blocks in alive:
            for tokens in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 256), (7, 7)):
                child = (root, (*blocks, (tokens, ())))
                found = self.index.walk(self.nodes[root, blocks], data(tokens))
                assert found == ([self.nodes[child]] if child in alive else [])

    @invariant()
    def events_rebuild_it(self) -> None:
        if not hasattr(self, "index"):
            return
        for event in self.index.events:
            known = self.outside[event.group_idx]
            if hasattr(event, "token_ids"):
                assert event.block_hash not in known
                known[event.block_hash] = event.token_ids
            else:
                del known[event.block_hash]
        self.index.events.clear()
        for group, blocks in enumerate(self.blocks):
            wanted = {self.hashes[path]: path[1][-1][0] for path in blocks if path in self.hashes}
            assert self.outside[group] == wanted


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(
    max_examples=examples(30, of=60), stateful_step_count=30, deadline=None
)
