"""The grid of attention: what a layer can look like × what a step can look like × where it lies.

A row of it is one kernel, so one compilation, and a few steps that the kernel serves. ``SAMPLE``
has the rows of ``make test``, in which pairs of levels meet; other tests use its kernels too, for
they are compiled then.
"""

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import torch

from attention.machines import ISAS
from conformance.attention_cases import (
    STORED,
    Case,
    Chunks,
    make_case,
    make_sinks,
    make_spec,
)
from conformance.covering import Row, cover, spread

# (queries and what came in, what is kept)
DTYPES = (
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
    ("bfloat16", "float8_e4m3fn"),
    ("float32", "int8"),
    ("float32", "float8_e4m3fn"),
    ("float32", "bfloat16"),
)
# (key, value), and for latents ("latent", rotary key) beside the first.
WIDTHS = (
    (64, 64),
    (100, 100),
    (40, 40),
    (24, 16),
    (40, 96),
    (40, 24, "latent"),
    (128, 128),
    (96, 96),
    (256, 256),
    (24, 24),
    (80, 80),
    (192, 128),
    (512, 64, "latent"),
)
SHARING = (1, 3, 7, 4, 16, 2, 8, 71)
EXTRAS = ((None, False), (2.0, False), (None, True), (1.5, True))  # softcap, sinks
KERNEL = MappingProxyType(
    {"isa": ISAS, "dtypes": DTYPES, "widths": WIDTHS, "sharing": SHARING, "extras": EXTRAS}
)

MIXES: MappingProxyType[str, Chunks] = MappingProxyType(
    {
        "decodes": ((30, 1), (0, 1), (63, 1), (64, 1), (149, 1), (7, 1)),
        "prefill": ((0, 1), (0, 17), (0, 40), (0, 66)),
        "later chunks": ((37, 20), (64, 16), (5, 3), (130, 5)),
        "mixed": ((0, 13), (31, 1), (5, 7), (0, 1), (40, 12), (8, 1), (90, 2)),
        "one long": ((700, 1), (3, 1)),
        "a long chunk": ((100, 40), (2, 1)),
    }
)
STEP = MappingProxyType(
    {
        "kind": (("full", 0), ("sliding", 9), ("sliding", 70), ("chunked", 6), ("chunked", 50)),
        "mix": tuple(MIXES),
        "block_size": (16, 4, 5, 32, 64),
        "strategy": STORED,
        "scores": ("usual", "large"),
        "threads": (2, 1, 3),
    }
)

# A compilation takes most of a second: ``make test`` has one for each pair of "isa" and "dtypes",
# and two of what takes longer. Without AMX only what is multiplied in pairs is another code; what
# the oldest lacks beside vectors is float16.
SAMPLED = MappingProxyType(
    {
        "isa": ("native", "avx2", "sse", "pairs"),
        "dtypes": DTYPES[:5],
        "widths": WIDTHS[:6],
        "sharing": SHARING[:4],
        "extras": EXTRAS,
    }
)
_LARGE: tuple[Row, ...] = (
    {"widths": (512, 64, "latent"), "sharing": 16, "extras": EXTRAS[0]},
    {"widths": (24, 16), "sharing": 71, "extras": EXTRAS[3]},
)
SAMPLE = (
    *(
        row
        for row in spread(SAMPLED, ("isa", "dtypes"))
        if row["isa"] != "pairs" or row["dtypes"][0] == "bfloat16"
        if row["isa"] != "sse" or row["dtypes"][1] not in ("float32", "bfloat16")
    ),
    *({"isa": "native", "dtypes": ("bfloat16", "bfloat16"), **row} for row in _LARGE),
)
STEPS = cover(STEP)
STEPS_EACH = 3  # steps of a kernel


def steps_of(number: int) -> list[Row]:
    """The steps that kernel ``number`` serves: all of them are served in turn."""
    return [STEPS[(number * STEPS_EACH + n) % len(STEPS)] for n in range(STEPS_EACH)]


def kv_heads_for(sharing: int) -> int:
    return 1 if sharing >= 16 else 3 if sharing == 2 else 2


def grid(isa: str) -> Iterator[Row]:
    """Every dtype × width of an instruction set; all pairs of the other factors."""
    yield from cover({**KERNEL, "isa": (isa,)}, fixed=("dtypes", "widths"))


def build(kernel: Row, step: Row) -> tuple[Case, dict[str, Any]] | None:
    """A case and the options of ``attend``; None where no storage has such a layer.

    What the step may not read is NaN already.
    """
    arriving, kept = kernel["dtypes"]
    q_dtype = getattr(torch, arriving)
    widths, sharing = kernel["widths"], kernel["sharing"]
    kind, reach = ("latent", 0) if "latent" in widths else step["kind"]
    spec = make_spec(
        kind,
        kv_heads=kv_heads_for(sharing),
        dims=widths[:2],
        dtype=kept,
        reach=reach,
    )
    if step["strategy"] == "paged" and step["block_size"] * sum(widths[:2]) % 4 and kept == "int8":
        return None  # the scales behind a block's entries would lie across their own size
    case = make_case(
        spec,
        sharing=sharing,
        q_dtype=q_dtype,
        strategy=step["strategy"],
        block_size=step["block_size"],
        chunks=MIXES[step["mix"]],
    )
    case.poison()
    softcap, has_sinks = kernel["extras"]
    # Larger ones would leave no float32 within its tolerance: torch's is off by 6e-6 at 12.
    by = 1 if step["scores"] == "usual" else 4
    scale = by * case.q.shape[-1] ** -0.5
    softcap = None if softcap is None else by * softcap
    sinks = make_sinks(case.q.shape[1], q_dtype) if has_sinks else None
    return case, dict(scale=scale, softcap=softcap, sinks=sinks)


def name_of(kernel: Row) -> str:
    q, kept = kernel["dtypes"]
    widths = "-".join(map(str, kernel["widths"]))
    extras = "".join(
        ["-cap"] * (kernel["extras"][0] is not None) + ["-sinks"] * kernel["extras"][1]
    )
    kept = "" if kept == q else f"-{kept}"
    return f"{kernel['isa']}-{q}{kept}-{widths}-x{kernel['sharing']}{extras}"
