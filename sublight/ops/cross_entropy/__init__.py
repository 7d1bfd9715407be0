"""The loss of logits against labels, and of a product that is never held."""
