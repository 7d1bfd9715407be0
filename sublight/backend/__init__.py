"""Everything that touches private parts of Triton and PyTorch; the rest of the project uses what is offered here."""
