"""The tree in the docstring is the tree in the code, and old habits catch the right branch."""

import inspect
import pickle

import pytest

from quire import errors
from quire.memory.cuda.driver import DriverError

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]


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


@pytest.mark.parametrize("kind", KINDS)
def test_each_arrives_in_another_process_as_what_it_is(kind: type[Exception]) -> None:
    sent = kind("no room: lower max_num_seqs=4")
    sent.__cause__ = OSError("not sent along")
    arrived = pickle.loads(pickle.dumps(sent))
    assert type(arrived) is kind
    assert str(arrived) == str(sent)


def test_the_drivers_words_arrive_too() -> None:
    arrived = pickle.loads(pickle.dumps(DriverError("cuMemMap", "CUDA_ERROR_UNKNOWN")))
    assert isinstance(arrived, DriverError)
    assert str(arrived) == "cuMemMap failed: CUDA_ERROR_UNKNOWN"
    assert (arrived.call, arrived.error) == ("cuMemMap", "CUDA_ERROR_UNKNOWN")
