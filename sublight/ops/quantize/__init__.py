"""8-bit codes and their scales."""
