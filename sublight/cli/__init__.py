"""The command, one verb a file."""
