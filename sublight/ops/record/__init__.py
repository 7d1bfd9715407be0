"""What an op is to PyTorch and to the tuner: its registration, its tiles, the table of those measured fastest."""
