"""The cure applied: modules swapped for kernels that win, calls captured as CUDA graphs; model in, model out."""
