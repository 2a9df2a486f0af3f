"""One page for what a simulation found: a file that needs nothing else, with a table behind each
plot.

``Report`` is what it is made from, ``render`` makes it. Nothing is simulated here.
"""

from quire.planner.report.content import Held, Report, Variant, held_by_batch, held_by_one
from quire.planner.report.page import render

__all__ = ["Held", "Report", "Variant", "held_by_batch", "held_by_one", "render"]
