"""Measurements of Quire: a folder an area, run from the root with ``python -m benchmarks.…``."""
