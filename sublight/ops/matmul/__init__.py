"""Products of matrices, from the naive tile to what the tensor cores can do; each step is a provider of its op."""
