"""Sums, maxima and running sums."""
