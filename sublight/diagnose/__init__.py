"""Why a step takes longer than its floor: one rule a file, each a what-if on the same replay."""
