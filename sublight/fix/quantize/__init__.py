"""Weights of a few bits in anybody's model: packed, multiplied as they lie, saved and loaded, undone."""
