"""The engine's own scheduler and accounting on a virtual clock."""
