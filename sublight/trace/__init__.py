"""Traces of PyTorch and Nsight Systems as columns: loading, capturing, asking. Nothing here draws."""
