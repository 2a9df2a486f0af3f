"""What a model remembers of sequences that share blocks: what every token stands for.

A token's keys and values depend on all that comes before it, so a slot's content is a number for
the whole prefix: salt, adapter, images and token ids up to and including that token. A recurrent
group has one slot a block, which holds the number of the last token computed. Whatever is wrongly
found, not copied, or given back too early shows as a wrong number in a slot.
"""

from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np

from conformance.strategy_cases import KINDS, layers_of, model_spec
from conformance.strategy_machine import Ids, SlotStore
from quire.kv import Image, PrefixHit, PrefixKeys
from quire.spec import Group, Layer, RecurrentState, StateTensor

SHARING_KINDS = (*KINDS, "recurrent", "recurrent+2", "hybrid")
CAT, DOG = (
    Image(content_id="cat", start=2, num_tokens=3),
    Image(content_id="dog", start=6, num_tokens=4),
)
TENANTS = (
    *[PrefixKeys()] * 5,
    PrefixKeys(salt="a"),
    PrefixKeys(salt="b"),
    PrefixKeys(lora="a" * 64),
    PrefixKeys(images=(CAT,)),
    PrefixKeys(images=(CAT, DOG)),
    PrefixKeys(salt="a", images=(DOG,)),
)
GARBAGE = -2  # what a rejected draft leaves behind
MAX_SEQS = 8


def groups_of(kind: str) -> tuple[Group, ...]:
    if kind in KINDS:
        return model_spec(layers_of(kind, "bfloat16", wide=False)).groups
    state = RecurrentState(
        states=(StateTensor(name="ssm", shape=(3, 40), dtype="float32"),),
        num_speculative_blocks=2 if kind == "recurrent+2" else 0,
    )
    like = {"hybrid": ("full+sliding", "chunked")}.get(kind, ("full",))
    specs = [spec for each in like for spec in layers_of(each, "bfloat16", wide=False)]
    spec = model_spec(tuple(specs))
    return replace(spec, layers=(*spec.layers, Layer(specs=(state,)))).groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A full block and all before it; a root, if it has no parent."""

    parent: int | None
    tokens: tuple[int, ...]
    extra: tuple[tuple[str, str], ...]
    digest: bytes


class Prefixes:
    """A number for each prefix, token by token and block by block."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.by_digest: dict[bytes, int] = {}
        self._contents: dict[Any, int] = {}
        self._numbers: dict[Any, int] = {}

    def content(self, before: Any, token: int, keys: PrefixKeys, at: int) -> int:
        seen = [
            (i.content_id, at - i.start) for i in keys.images if 0 <= at - i.start < i.num_tokens
        ]
        return self._contents.setdefault((before, token, *seen), len(self._contents))

    def node(self, parent: int | None, tokens: tuple[int, ...], extra: Any) -> int:
        number = self._numbers.setdefault((parent, tokens, extra), len(self.nodes))
        if number == len(self.nodes):
            before = b"" if parent is None else self.nodes[parent].digest
            text = repr(extra).encode() if extra else b""
            digest = sha256(before + text + np.array(tokens, np.int32).tobytes()).digest()
            self.nodes.append(Node(parent=parent, tokens=tokens, extra=extra, digest=digest))
            self.by_digest[digest] = number
        return number


@dataclass(kw_only=True)
class Held:
    """What the model knows of a sequence."""

    keys: PrefixKeys
    root: int
    priority: int = 0
    ids: list[int] = field(default_factory=list)  # its text, as far as it is known
    contents: list[int] = field(default_factory=list)  # what each token stands for
    nodes: list[int] = field(default_factory=list)  # … and each full block
    room: int = 0  # tokens
    written: int = 0
    computed: int = 0  # … of which the cache has been told
    base: int = 0  # tokens before the last extension
    lookahead: int = 0  # drafts of this step
    tells: int = 0  # when its tokens are marked as computed: always, sometimes, never
    pin: bool = False

    def copy(self) -> "Held":
        lists = {name: getattr(self, name).copy() for name in ("ids", "contents", "nodes")}
        return replace(self, base=self.room, **lists)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Sequence ``seq_id`` goes from ``begin`` tokens to room for ``end``."""

    seq_id: int
    begin: int
    end: int
    hit: PrefixHit | None = None
    external: int = 0  # of the tokens before the beginning, those from outside
    drafts: int = 0
    promised: int = 0
    kept_bytes: int = 0


class Contents(SlotStore):
    """A number a slot; a slot of a recurrent group is a block, and its bytes are the block's.

    Slots are the pool's: ``seen`` looks through a window.
    """

    def lies(self, group: int, slots: Ids) -> Ids:
        return slots

    def seen(self, group: int, slots: Ids) -> Ids:
        """The pool's slots that windows show in these slots of theirs; -1: nothing."""
        assert self._shown is not None
        return self._shown[group][slots]

    def num_mappings(self, group: int, row_slots: int, heap_slots: int) -> int:
        """Those of pages to addresses, and of addresses between them that show nothing."""
        assert self._shown is not None
        shown, count = self._shown[group].reshape(-1, row_slots), 0
        for row in shown[(shown >= 0).any(axis=1)]:
            goes_on = (row[1:] == row[:-1] + 1) & (row[1:] % heap_slots != 0) & (row[:-1] >= 0)
            count += 1 + int((~goes_on & (row[1:] != row[:-1])).sum())
        return count
