"""How many bytes the KV cache may take: five rules, each with the ledger that explains it."""

from quire.memory.budget.ledger import Ledger, Needs, Remedy, Term
from quire.memory.budget.rules import (
    BUDGETS,
    BY_OWN_MEMORY,
    GIVEN,
    EncoderFootprint,
    Footprint,
    Mode,
    headroom_bytes,
    make_ledger,
)

__all__ = [
    "BUDGETS",
    "BY_OWN_MEMORY",
    "GIVEN",
    "EncoderFootprint",
    "Footprint",
    "Ledger",
    "Mode",
    "Needs",
    "Remedy",
    "Term",
    "headroom_bytes",
    "make_ledger",
]
