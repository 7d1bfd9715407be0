"""How this machine's GPUs and its host are: read, and held against what is well. Measures nothing, draws nothing."""
