"""Softmax and what follows it: its logarithm, its largest values, a draw."""
