"""One file a verb: its flags, and what it hands them to. Heavy imports are inside, so that `--help` answers at once."""
