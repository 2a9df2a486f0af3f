"""The models that can be planned for: where their configs, shapes and weights are read."""
