"""Recurrent layers, whose states the engine keeps sequence by sequence."""
