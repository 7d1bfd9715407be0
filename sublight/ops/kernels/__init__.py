"""Parts of kernels that several families share: rows, pointwise places, random bits, sums over columns."""
