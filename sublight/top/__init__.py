"""Watching a machine: one snapshot after another, kept, written down, served, or under a load of our own."""
