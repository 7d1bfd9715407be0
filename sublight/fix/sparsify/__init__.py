"""Weights of anybody's model with two zeros in every four, multiplied by the sparse tensor cores where there are."""
