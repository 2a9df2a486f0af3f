"""The examples of plug-ins, as pip leaves a package: modules on the path, and entry points."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.attention import BACKENDS
from quire.kv import EVICTION_POLICIES
from quire.tiers import TIERS

EXAMPLES = Path(__file__).parents[1] / "examples"
ENTRY_POINTS = """
[quire.attention_backends]
einsum = attention_backend:make_backend
[quire.eviction_policies]
lfu = eviction_policy:LeastFrequentlyUsed
[quire.tiers]
sqlite = tier:SqliteTier
"""


@contextmanager
def installed_examples(folder: Path) -> Iterator[None]:
    """Have the registries find the examples, by entry points of a distribution in ``folder``."""
    info = folder / "examples_of_quire-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: examples-of-quire\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.syspath_prepend(str(EXAMPLES))
        for registry in (
            BACKENDS,
            EVICTION_POLICIES,
            TIERS,
        ):  # as a new process, which has not looked yet
            patch.setattr(registry, "_found", None)
        yield
