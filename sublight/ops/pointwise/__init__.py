"""One result an element: sums, activations, dropout."""
