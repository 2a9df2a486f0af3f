"""Define all errors that Quire raises on purpose.

    QuireError
    ├── ConfigError            an option or a config.json field is wrong (also a ValueError)
    │   └── UnsupportedModel   this model cannot be held, or its layers were not reached
    ├── ModelNotLoadable       the folder, name or weight file cannot be read
    ├── RequestError           one request is wrong; others go on (also a ValueError)
    │   └── RequestTooLong     it can never fit: the sum and the option to change are in the message
    ├── OutOfKVMemory          no room now, and no sequence that could wait (also a MemoryError)
    ├── MemoryUnavailable      the operating system refused address space or pages (a MemoryError)
    └── RankLost               a process that holds a part of the model has ended

A message says what failed, the value, the limit, and the option to change. Running out of KV memory
inside the engine is not an error: the scheduler waits or preempts. Only callers without a scheduler
(a cache handed to ``model.generate``) see ``OutOfKVMemory``.
"""


class QuireError(Exception):
    """The base class of all errors that Quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """An option or a ``config.json`` field has a value that cannot work."""


class UnsupportedModel(ConfigError):
    """The model needs what Quire cannot hold, or its layers never reported to the cache."""


class ModelNotLoadable(QuireError):
    """The model's files are missing, truncated or not what they claim to be."""


class RequestError(QuireError, ValueError):
    """One request is wrong. It ends; nothing else changes."""


class RequestTooLong(RequestError):
    """The request can never fit, however long it waits."""


class OutOfKVMemory(QuireError, MemoryError):
    """No room for more tokens now, raised where no scheduler could wait for room."""


class MemoryUnavailable(QuireError, MemoryError):
    """The operating system refused address space or pages."""


class RankLost(QuireError):
    """A process that holds a part of the model has ended, and the others cannot go on."""


def one_line(error: BaseException) -> str:
    """Return an error as one line, for a log or a message: an error of Quire without its class."""
    words = str(error) if isinstance(error, QuireError) else repr(error)
    return " ".join(words.split())[:300]
