"""A transformer layer's other parts: what attention leaves, where ours is faster than torch."""
