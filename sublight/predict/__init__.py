"""What a model will do on a GPU that is not at hand: a config becomes a list of ops, each op a floor and a time.

`model` reads a config, `census` lists the ops of a step, `memory` what it holds, `expected` times an op, `estimate` puts
them together. Nothing here imports torch, except `module`, which is given an nn.Module.
"""
