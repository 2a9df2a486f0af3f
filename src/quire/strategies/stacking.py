"""Which layers lie together, so that a few tokens fill a page.

A *stack* is some layers of a group; all that a token has in them is one piece of memory, ``[layers,
K, {key, value}, D]`` (scales last), and tokens are equally far apart. On pages of 2 MiB one layer's
entries of 512 tokens of Qwen3-4B fill one; those of four layers, of 128. So short sequences waste
less, and a layer's entries lie farther apart.

``auto`` takes about four layers, as many as make tokens fill pages exactly, and leaves a little
empty where none do.

Source: vAttention (tensor slicing)
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm
from typing import Literal, TypeAlias

from quire.spec import Group, KeptWhole
from quire.units import ceil_div

# None: not together; ranges are head-major then, and what is seen through windows one stack.
LayersPerPage: TypeAlias = int | Literal["auto"] | None

_ABOUT = 4  # layers: to be measured, see docs/decisions/0039-memory-of-the-engine-on-a-gpu.md
_LARGE_PAGE_BYTES = 2**20
_EMPTY_SHARE = 8  # at most an eighth of what tokens take is left empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacking:
    """How a group's layers lie together."""

    num_layers: int  # in a stack; the last one may have fewer
    num_stacks: int
    token_bytes: int  # of a stack, from one token to the next

    @property
    def slot_bytes(self) -> int:
        """What a token takes in all the group's layers."""
        return self.num_stacks * self.token_bytes

    def page_tokens(self, page_bytes: int) -> int:
        """The fewest tokens that fill whole pages."""
        return lcm(self.token_bytes, page_bytes) // self.token_bytes

    def stacks(self, group: Group) -> list[tuple[int, ...]]:
        """The group's layers, stack by stack."""
        each, layers = self.num_layers, group.layers
        return [layers[first : first + each] for first in range(0, len(layers), each)]


def suited_to(page_bytes: int) -> LayersPerPage:
    """Which layers should lie together: of a GPU's pages, one head's entries would fill none."""
    return "auto" if page_bytes >= _LARGE_PAGE_BYTES else None


def stacking(group: Group, page_bytes: int, layers_per_page: LayersPerPage) -> Stacking:
    """Of a group that has tokens; None: all its layers in one stack."""
    if layers_per_page == "auto":
        return _suited(group, page_bytes)
    return _of(group, min(layers_per_page or group.num_layers, group.num_layers))


def stacking_of_ranges(
    group: Group, page_bytes: int, layers_per_page: LayersPerPage
) -> Stacking | None:
    """The same for ranges, which None lays out head by head instead. A state is no stack."""
    if layers_per_page is None or isinstance(group.spec, KeptWhole):
        return None
    return stacking(group, page_bytes, layers_per_page)


def apart(
    groups: Iterable[Group], page_bytes: int, layers_per_page: LayersPerPage
) -> list[tuple[Group, Stacking | None]]:
    """Groups of layers that can be moved without others: each layer by itself, or each stack."""
    found: list[tuple[Group, Stacking | None]] = []
    for group in groups:
        whole = stacking_of_ranges(group, page_bytes, layers_per_page)
        pieces = [(layer,) for layer in group.layers] if whole is None else whole.stacks(group)
        own = whole and replace(whole, num_stacks=1)
        found += [(Group(spec=group.spec, layers=layers), own) for layers in pieces]
    return found


def _of(group: Group, num_layers: int, token_bytes: int | None = None) -> Stacking:
    return Stacking(
        num_layers=num_layers,
        num_stacks=ceil_div(group.num_layers, num_layers),
        token_bytes=token_bytes or num_layers * _layer_bytes(group),
    )


def _suited(group: Group, page_bytes: int) -> Stacking:
    held = group.num_layers * _layer_bytes(group)
    counts = range(1, min(4 * _ABOUT, group.num_layers) + 1)
    for count in sorted(counts, key=lambda count: abs(count - _ABOUT)):
        filled = 1 << (count * _layer_bytes(group) - 1).bit_length()
        found = _of(group, count, filled)
        if page_bytes % filled == 0 and _EMPTY_SHARE * (found.slot_bytes - held) <= held:
            return found
    exact = [_of(group, count) for count in counts if group.num_layers % count == 0]
    return min(
        exact,
        key=lambda s: (s.page_tokens(page_bytes) * s.slot_bytes, abs(s.num_layers - _ABOUT)),
    )


def _layer_bytes(group: Group) -> int:
    return group.bytes_per_token // group.num_layers
