"""Bytes that change their place and nothing else: permutations, compaction, rows of a table."""
