"""What memory was used for, in the mean over time: a bar a variant, of all replicas together."""

from quire.planner.report.content import Bar, Part, Report, Section, Table, Variant
from quire.planner.report.words import share, size

_KEYS = (
    ("used", "used"),
    ("later", "empty, and filled later"),
    ("empty", "empty, and never filled (internal fragmentation)"),
    ("cached", "cached"),
    ("pieces", "not committed, and in pieces too small for what waits (external fragmentation)"),
    ("free", "not committed"),
)


def utilization_section(report: Report) -> Section:
    colors = report.colors()
    return Section(
        name="utilization",
        title="What memory was used for",
        text=[
            "Means over time. Utilization is what is used of what sequences hold. What is only "
            "cached does not count: it goes to a sequence that needs room. What is held and empty "
            "is either filled later, before its sequence ends, or never. The paper of "
            "PagedAttention (Kwon et al. 2023) measured 20 to 38 % where the maximum is reserved, "
            "and 96 % in blocks."
        ],
        keys=_KEYS,
        bars=[_bar(each, color) for each, color in zip(report.variants, colors, strict=True)],
        table=Table(
            head=("", "memory", *(meaning for _, meaning in _KEYS), "utilization"),
            rows=[
                [
                    variant.name,
                    size(_memory(variant)),
                    *(size(number) for _, _, number in _parts(variant)),
                    share(variant.result.utilization),
                ]
                for variant in report.variants
            ],
        ),
    )


def _bar(variant: Variant, color: str) -> Bar:
    memory = _memory(variant)
    return Bar(
        name=variant.name,
        color=color,
        remark=f"{share(variant.result.utilization)} of what is held is used",
        parts=[
            Part(
                kind=kind,
                label=label,
                share=number / memory if memory else 0.0,
                text=f"{size(number)}, {share(number / memory if memory else 0.0)} of the memory",
            )
            for kind, label, number in _parts(variant)
        ],
    )


def _memory(variant: Variant) -> int:
    return variant.result.memory_bytes * variant.result.num_replicas


def _parts(variant: Variant) -> list[tuple[str, str, float]]:
    """They sum up to the memory."""
    result = variant.result
    empty = max(0.0, result.committed_bytes - result.used_bytes - result.cached_bytes)
    free = max(0.0, _memory(variant) - result.committed_bytes)
    later, pieces = result.later_fraction or 0.0, result.pieces_fraction or 0.0
    numbers = (
        *(result.used_bytes, later * empty, (1 - later) * empty, result.cached_bytes),
        *(pieces * free, (1 - pieces) * free),
    )
    return [(kind, label, each) for (kind, label), each in zip(_KEYS, numbers, strict=True)]
