"""Products: from a loop over k to tensor cores, then shapes and weights that need something else."""
