"""What ``pytest --strategy`` and ``--provider`` name: the suites run on that, and on nothing else.

Without them the suites run on Quire's own strategies, with all their options, and its own memories.
"""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch

from quire.attention import BACKENDS
from quire.kv import EVICTION_POLICIES, STRATEGIES
from quire.memory import PROVIDERS, MemoryProvider, MemoryRequest
from quire.plugins import Registry
from quire.tiers import TIERS, TierAddress

STRATEGY, PROVIDER = "QUIRE_TEST_STRATEGY", "QUIRE_TEST_PROVIDER"
TIER = "QUIRE_TEST_TIER"
OPTIONS: Mapping[str, Registry[Any]] = MappingProxyType(
    {
        "--strategy": STRATEGIES,
        "--provider": PROVIDERS,
        "--attention-backend": BACKENDS,
        "--eviction-policy": EVICTION_POLICIES,
        "--tier": TIERS,
    }
)


def choose(names: Mapping[str, str | None]) -> None:
    """Note what options of the command line name, before suites are read.

    Raises: ConfigError for a name that is unknown, or that stands for what is none.
    """
    for option, name in names.items():
        if name is not None:
            kind = TierAddress.parse(name).kind if option == "--tier" else name
            OPTIONS[option].find(kind, option)
    for variable, option in ((STRATEGY, "--strategy"), (PROVIDER, "--provider"), (TIER, "--tier")):
        os.environ.pop(variable, None)
        if (name := names[option]) is not None:
            os.environ[variable] = name


def is_chosen() -> bool:
    return STRATEGY in os.environ or PROVIDER in os.environ


def concerns(item: pytest.Item) -> bool:
    """Tell whether a test runs on what was named: one of its parameters says so."""
    call = getattr(item, "callspec", None)
    names = {os.environ.get(STRATEGY), os.environ.get(PROVIDER)} - {None}
    values = () if call is None else call.params.values()
    return any(isinstance(value, str) and value.partition("/")[0] in names for value in values)


def options_of(own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the cases of ``strategy_cases``, or those of the strategy that was named.

    Its cases are the numbers that any strategy may be given: small blocks, and layers in stacks, as
    a GPU's large pages have them. One that maps pages does so too.
    """
    if (name := os.environ.get(STRATEGY)) is None:
        return own
    cases: dict[str, Any] = {
        f"{name}/plain": (name, {}),
        f"{name}/stacks": (name, {"block_size": 4, "layers_per_page": "auto"}),
    }
    if STRATEGIES[name].maps_pages:
        cases[f"{name}/shared"] = (name, {"shares_pages": True, "heap_bytes": 2**14})
    return cases


def sampled(*own: str) -> tuple[str, ...]:
    """Return which of the own cases run by default; of what was named, every case does."""
    return own if STRATEGY not in os.environ else tuple(options_of({}))


def strategies() -> list[str]:
    """Return the strategies that the suites run on."""
    name = os.environ.get(STRATEGY)
    return [*STRATEGIES.own_names] if name is None else [name]


def provider() -> tuple[str, MemoryProvider] | None:
    """Make the memory that was named; None if none was."""
    if (name := os.environ.get(PROVIDER)) is None:
        return None
    return name, PROVIDERS[name](MemoryRequest(device=torch.device("cpu")))
