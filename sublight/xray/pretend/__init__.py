"""A GPU that is not here: torch's "cuda" is the CPU, and Triton finds the GPU that is named."""
