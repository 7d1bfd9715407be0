"""Whatever can be named on the command line, turned into Code."""
