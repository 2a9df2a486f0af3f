"""How much of large pages a short sequence fills: what to keep side by side.

On a GPU a page has 2 MiB. A stream is what is kept together for one token: keys, values or both,
of one layer or several. Each stream of a sequence has pages of its own, so more layers in a stream
waste less; and the entries of one layer lie farther apart.

Source: vAttention (tensor slicing, "megacache")
"""

from dataclasses import dataclass

from quire.errors import ConfigError
from quire.units import ceil_div


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Layers and pages of one sequence. ``entry_bytes``: the key of one token in one layer."""

    num_layers: int
    layers_per_page: int
    entry_bytes: int
    page_bytes: int
    values_apart: bool = False  # keys and values in different pages

    def __post_init__(self) -> None:
        if self.layers_per_page < 1 or self.num_layers % self.layers_per_page:
            raise ConfigError(
                f"layers_per_page={self.layers_per_page} does not divide {self.num_layers} layers"
            )

    @property
    def num_streams(self) -> int:
        return self.num_layers // self.layers_per_page * (2 if self.values_apart else 1)

    @property
    def stream_bytes(self) -> int:
        """Bytes of one token in one stream."""
        return self.layers_per_page * self.entry_bytes * (1 if self.values_apart else 2)

    @property
    def tokens_per_page(self) -> float:
        return self.page_bytes / self.stream_bytes

    @property
    def expected_waste_bytes(self) -> int:
        """Half a page a stream, at lengths that know nothing of pages."""
        return self.num_streams * self.page_bytes // 2

    def committed_bytes(self, num_tokens: int) -> int:
        pages = ceil_div(num_tokens * self.stream_bytes, self.page_bytes)
        return self.num_streams * pages * self.page_bytes
