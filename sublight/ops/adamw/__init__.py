"""AdamW's update of all tensors at once, and the optimizer on top of it."""
