"""Ways to run a model over what a storage holds: through tables, gathered, or alone."""

from quire.models.ways.choice import WAYS, Way, make_way

__all__ = ["WAYS", "Way", "make_way"]
