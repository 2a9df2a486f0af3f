"""The parts of the scheduler. Each decides one thing, and none knows a tensor of a model."""
