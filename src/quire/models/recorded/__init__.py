"""A model's pass over few tokens, recorded once and played again without running its Python.

Between the products of a small step the model's own Python takes up to a third of their time. What
it does in the end is a list of torch operators and of calls of our kernels, the same for every step
of as many tokens. So that list is written down while the model runs over made-up tokens, and gone
through from then on, in the memory that it was written for. What differs from step to step is only
where keys and values are written and read: a few words of some calls.

A model whose list depends on its input (a mixture that looks where its tokens go, positions that
turn otherwise past some length) shows it by its operators, and is not recorded.
"""

from quire.models.recorded.recordings import Recordings

__all__ = ["Recordings"]
