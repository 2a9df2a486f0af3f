"""Many requests at once over any strategy. ``engine.Engine.step`` is the loop to read first.

Importing the room, ``sequence`` or ``scheduler`` imports no torch; the other modules may.
"""
