"""Gated activations, and the block between two products that they stand in."""
