"""Plots as SVG of our own: no library, no fonts, nothing fetched.

``line_chart`` is a file that stands by itself; ``Plot`` is what pages draw on. What is drawn, and
where the numbers come from, the caller knows.
"""

from quire.figures.lines import Line, line_chart
from quire.figures.plot import Plot
from quire.figures.scales import Scale, spread, ticks, ticks_of_powers, ticks_of_time

__all__ = [
    "Line",
    "Plot",
    "Scale",
    "line_chart",
    "spread",
    "ticks",
    "ticks_of_powers",
    "ticks_of_time",
]
