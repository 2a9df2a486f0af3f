"""Import many modules at once, without a search for garbage among what they make.

Modules live as long as the process. While they are imported the garbage collector looks through
them again and again: it took a sixth of a server's start.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Turn the garbage collector off inside the block, and have it pass over what was made there.

    At exit the modules are unfrozen, because C++ bindings would report their own as leaks.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
        atexit.register(gc.unfreeze)
    finally:
        if was_on:
            gc.enable()
