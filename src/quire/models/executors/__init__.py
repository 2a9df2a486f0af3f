"""Ways to run a model over what a storage holds: through tables, gathered, or alone."""
