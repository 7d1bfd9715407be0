"""Attention over whole tensors, and over a cache in pages."""
