"""What the C allocator keeps for itself after others have given it back."""

import ctypes


def trim_allocator() -> bool:
    """Ask it to return free memory to the system; False where it cannot be asked (not glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(0))
