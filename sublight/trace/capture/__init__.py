"""Run a script or a block and record it."""
