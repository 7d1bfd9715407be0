"""One run over several processes, started by torchrun: PyTorch's own ways to share a model out."""
