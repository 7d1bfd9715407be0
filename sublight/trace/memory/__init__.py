"""What fills the memory, from a trace or a snapshot."""
