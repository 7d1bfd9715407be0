"""What Nsight Compute counted, and how far the predictions are from it."""
