"""Our attention inside of other people's modules: PyTorch's `MultiheadAttention`, Hugging Face's models."""
