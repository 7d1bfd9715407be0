"""Rotary positions, alone and after the norm of queries and keys."""
