"""What tells prefixes apart besides their token ids: a tenant's salt, an adapter, images.

Each is tagged, so that an adapter's name can never be taken for a salt.
"""

from dataclasses import dataclass

from quire.blocks.prefix_index import Extra


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """Content that stands behind placeholder tokens [start, start + num_tokens)."""

    content_id: str  # a hash of the content
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixKeys:
    """Sequences share a prefix only if these are equal for it."""

    salt: str = ""  # a tenant's secret: sequences of different salts never see each other's blocks
    lora: str = ""  # the adapter that computes keys and values: name and version
    images: tuple[Image, ...] = ()

    def of_root(self) -> Extra:
        """What holds for every block."""
        tagged = (("salt", self.salt), ("lora", self.lora))
        return tuple(pair for pair in tagged if pair[1])

    def of_blocks(self, block_size: int) -> tuple[Extra, ...]:
        """What holds for single blocks: which images reach into each, and where they begin."""
        extras: dict[int, Extra] = {}
        for image in sorted(self.images, key=lambda image: image.start):
            stop = image.start + image.num_tokens
            for index in range(image.start // block_size, -(-stop // block_size)):
                place = f"{image.content_id}@{image.start - index * block_size}"
                extras[index] = (*extras.get(index, ()), ("image", place))
        return tuple(extras.get(index, ()) for index in range(max(extras, default=-1) + 1))


NO_KEYS = PrefixKeys()
