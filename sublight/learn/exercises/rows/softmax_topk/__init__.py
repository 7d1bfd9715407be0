"""Softmax and its largest entries in one pass: what a router of experts and a sampler need."""

from __future__ import annotations

from dataclasses import replace

from sublight.correct import Inputs
from sublight.cost import Cost, Shape, size_bytes
from sublight.learn.record import Exercise, Goal, Problem, problem_of

K = 4


def cost(shape: Shape, dtype: str) -> Cost:
    read = size_bytes(shape["rows"] * shape["cols"], dtype)
    kept = size_bytes(shape["rows"] * K, dtype) + size_bytes(shape["rows"] * K, "int64")
    return Cost(read_bytes=read, write_bytes=kept)  # read x, write K values and K places of each row


def problem() -> Problem:
    """The op's logits, which stand 1/16 apart: among few columns they are always the same numbers, and the error of
    their sum one and the same, lucky or not. In float32 each is moved a little."""
    plain = problem_of("softmax_topk", k=K)

    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        import torch

        (x,) = plain.inputs(shape, dtype, device, seed)
        if dtype == "float32" and device != "meta":
            luck = torch.Generator(device).manual_seed(seed + 1)
            x += (torch.rand(x.shape, generator=luck, device=device) - 0.5) / 32
        return (x,)

    return replace(plain, inputs=inputs)


SOFTMAX_TOPK = Exercise(
    name="softmax_topk",
    chapter="rows",
    problem=problem,
    cost=cost,
    arguments=("x",),
    outputs=("values", "index"),
    apart=("x",),
    sizes={"rows": (1, 8), "cols": (4, 700)},
    shown={"rows": 5, "cols": 500},
    goal=Goal(shape={"rows": 16384, "cols": 1024}, fraction=0.4, on_gpu={"rows": 65536, "cols": 1024}),
    needs=("softmax",),
)
