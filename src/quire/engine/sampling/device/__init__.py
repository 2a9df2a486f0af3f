"""The same work on a device: what is asked for comes back in one copy, and is waited for once.

``choices`` is the way through; ``draws``, ``edits``, ``filters`` and ``logprobs`` are the twins of
the modules with their names a level higher.
"""

from quire.engine.sampling.device.choices import DeviceChoices

__all__ = ["DeviceChoices"]
