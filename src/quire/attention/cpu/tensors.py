"""A layer's view in the kernels' words."""

from quire.kernels.tensors import words
from quire.kv import LayerView


def view_words(view: LayerView) -> tuple[int, ...]:
    """Where a layer's keys, values and scales lie: the words from "k" to "scale_token"."""
    scales = words(view.k_scale, 3)
    return (
        *words(view.k, 3), *words(view.v, 3),
        scales[0], *words(view.v_scale, 0), *scales[1:],
    )  # fmt: skip
