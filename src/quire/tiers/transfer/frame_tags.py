"""``FrameTags``: what shows that a frame is of the other end of this connection, and of its place.

A frame that was changed, put in, left out, repeated, moved or taken from another connection has
another tag.
"""

import hmac
from typing import Final, final

TAG_BYTES: Final = 16


@final
class FrameTags:
    """The tags of one direction's frames, which count them."""

    def __init__(self, key: bytes) -> None:
        """``key``: of this direction of this connection alone."""
        self._key, self._count = key, 0

    def next(self, frame: bytes | bytearray) -> bytes:
        """Return the tag of the next frame: ``TAG_BYTES``."""
        data = self._count.to_bytes(8, "little") + frame
        self._count += 1
        return hmac.digest(self._key, data, "sha256")[:TAG_BYTES]
