"""Make an HTML page of what a simulation found, with a table behind each plot.

``render`` makes the page from a ``Report``. It needs no other file and no network.
"""

from quire.planner.report.content import Held, Report, Variant, held_by_batch, held_by_one
from quire.planner.report.page import render

__all__ = ["Held", "Report", "Variant", "held_by_batch", "held_by_one", "render"]
