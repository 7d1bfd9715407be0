"""What a model will do on a GPU that is not at hand: a config becomes a list of ops, each op a floor and a time.

`config` reads a model, `census` lists the ops of a step, `memory` what it holds, `expected` times an op, `estimate`
puts them together. `plan` spreads a model over GPUs. Nothing here imports torch but `module`, which is given
an nn.Module.
"""
