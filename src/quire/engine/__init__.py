"""The engine: many requests at once over any strategy. Read ``Engine.step`` in ``core`` first.

Importing this room, ``sequence`` or ``scheduler`` imports no torch.
"""
