"""The emulator has the functions and numbers of NVIDIA's bindings, where those are installed."""

import inspect
from enum import IntEnum

import pytest

from memory.cuda import names
from memory.cuda.emulator import EmulatedDriver
from quire.memory.cuda.driver import FUNCTIONS, TYPES

ENUMERATIONS = [name for name, found in vars(names).items() if name.startswith("CU")]


@pytest.fixture(scope="module")
def real() -> object:
    return pytest.importorskip(
        "cuda.bindings.driver",
        reason="nothing to compare the emulator with: pip install 'quire-kv[cuda]'",
        exc_type=ImportError,
    )


def parameters(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_same_parameters(real: object, name: str) -> None:
    ours = parameters(getattr(EmulatedDriver, name))
    assert ours == parameters(getattr(real, name)) == FUNCTIONS[name].split()


@pytest.mark.parametrize("name", ENUMERATIONS)
def test_names_have_the_same_numbers(real: object, name: str) -> None:
    ours: type[IntEnum] = getattr(names, name)
    theirs = getattr(real, name)
    assert {member.name: int(member) for member in ours} == {
        member.name: int(getattr(theirs, member.name)) for member in ours
    }


@pytest.mark.parametrize("name", ["CUmemAllocationProp", "CUmemAccessDesc"])
def test_descriptions_have_the_same_fields(real: object, name: str) -> None:
    ours, theirs = getattr(EmulatedDriver(), name)(), getattr(real, name)()
    for described in (ours, theirs):
        described.location.type = real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        described.location.id = 3
        assert described.location.id == 3
    for field in vars(ours):
        assert hasattr(theirs, field)


def test_all_that_is_used_is_emulated() -> None:
    assert len(FUNCTIONS) == 21
    assert all(hasattr(EmulatedDriver, name) for name in (*TYPES, *FUNCTIONS))
