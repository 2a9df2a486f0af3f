"""Blocks between an engine's cache and its tiers: ``carrier`` ties the other modules together."""
