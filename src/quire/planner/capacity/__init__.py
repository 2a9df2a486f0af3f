"""What a model needs and what fits, in bytes, from its files alone."""
