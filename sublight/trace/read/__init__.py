"""Files that others recorded: Chrome JSON, Nsight Systems."""
