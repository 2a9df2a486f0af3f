"""A model's own bytes: its weights, and an estimate of what one step computes in between.

Where the numbers come from, others say: a model in memory, or its files alone.
"""

from dataclasses import dataclass

_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of a model besides its cache."""

    weights_bytes: int
    counted_bytes: int  # of these, in pages that the system counts as used: not mapped from a file
    hidden_size: int
    widest_rows: int  # outputs a token has in the widest of the layers' products
    vocab_size: int
    item_bytes: int  # of an activation

    def activation_bytes(self, num_tokens: int, num_logits: int) -> int:
        """An estimate of what one step over so many tokens holds at its peak.

        In a layer: the stream of hidden states and what is added to it, three of them once more in
        float32 for a norm, and three results of the widest product (gate, up, and both multiplied).
        After the layers: logits twice, and ten float32 copies where top-p sorts and filters them.
        """
        head = num_logits * self.vocab_size * (2 * self.item_bytes + 10 * _FLOAT32_BYTES)
        return max(self._layer_bytes(num_tokens), head)

    def graph_bytes(self, num_tokens: int) -> int:
        """An estimate of what recorded steps of up to so many tokens keep, logits for each.

        They share what they compute with, so that the largest counts, and where their logits come
        out. Tokens are chosen outside.
        """
        return self._layer_bytes(num_tokens) + 2 * num_tokens * self.vocab_size * self.item_bytes

    def _layer_bytes(self, num_tokens: int) -> int:
        return num_tokens * (
            3 * self.widest_rows * self.item_bytes
            + self.hidden_size * (3 * self.item_bytes + 3 * _FLOAT32_BYTES)
        )
