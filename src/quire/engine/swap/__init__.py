"""Sequences that make room wait elsewhere, and come back as they were."""
