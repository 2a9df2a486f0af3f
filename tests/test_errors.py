"""The tree in the docstring is the tree in the code, and old habits catch the right branch."""

import inspect

from quire import errors


def test_the_docstring_draws_every_error() -> None:
    drawn = errors.__doc__ or ""
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        assert issubclass(kind, errors.QuireError)
        assert name in drawn
        assert kind.__doc__


def test_each_is_also_what_a_caller_would_expect() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.RequestTooLong, ValueError)
    assert issubclass(errors.OutOfKVMemory, MemoryError)
    assert issubclass(errors.MemoryUnavailable, MemoryError)
