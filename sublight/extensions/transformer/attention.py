"""Causal attention: every score in memory, or none."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.extensions.ladder import Ladder, Rung
from sublight.extensions.transformer import launch
from sublight.extensions.transformer.ladder import drawn, gradients, of_transformer, words

if TYPE_CHECKING:
    from torch import Tensor


def _attend(qkv: Tensor, *kept: Tensor, heads: int) -> Tensor:
    import torch

    batch, time, width = qkv.shape
    q, k, v = qkv.view(batch, time, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    after = torch.ones(time, time, dtype=torch.bool, device=qkv.device).triu(1)
    out: Tensor = torch.softmax(scores.masked_fill(after, -math.inf), -1) @ v
    return out.transpose(1, 2).reshape(batch, time, -1)


HEADS = 2  # heads in the checked and timed shapes: a row of qkv does not say how many it holds


def _attention_inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    return (drawn(device, seed)(shape["batch"], shape["time"], 3 * HEADS * shape["head_dim"]),)


def _attention_backward_inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """d_out, qkv, out, and the logarithm of each row's sum."""
    import torch

    (qkv,) = _attention_inputs(shape, dtype, device, seed)
    batch, time, _ = qkv.shape
    q, k, _ = qkv.double().view(batch, time, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    after = torch.ones(time, time, dtype=torch.bool, device=device).triu(1)
    lse = scores.masked_fill(after, -math.inf).logsumexp(-1).float()
    out = _attend(qkv.double(), heads=HEADS).float()
    return drawn(device, seed + 2)(out.shape), qkv, out, lse


def _pairs(shape: Shape) -> float:
    return shape["batch"] * HEADS * shape["time"] * (shape["time"] + 1) / 2  # pairs of query and key


def _attention_words(shape: Shape) -> float:
    return shape["batch"] * shape["time"] * HEADS * shape["head_dim"]


ATTENTION_SHAPES = {"float32": ({"batch": 16, "time": 1024, "head_dim": 64},)}
ATTENTION_TESTS = (
    {"batch": 1, "time": 1, "head_dim": 1},
    {"batch": 2, "time": 9, "head_dim": 36},
    {"batch": 1, "time": 5, "head_dim": 128},
)
ATTENTION = Ladder(
    **of_transformer("attention", "causal attention of two heads, queries, keys and values in one tensor"),
    reference=functools.partial(_attend, heads=HEADS),
    inputs=_attention_inputs,
    cost=lambda shape, dtype: words(
        3 * _attention_words(shape), _attention_words(shape), 4 * _pairs(shape) * shape["head_dim"]
    ),
    shapes=ATTENTION_SHAPES,
    test_shapes=ATTENTION_TESTS,
    rungs=(
        Rung(
            name="three_kernels",
            kernels=("attention_scores", "attention_softmax", "attention_values"),
            launch=lambda runner, qkv: launch.attention_three(runner, qkv, HEADS),
            change="As it is written down: every score into memory, the softmax of each row over it, then the product "
            "with the values. The scores, time x time for each head, are written and read twice, and half of them are "
            "-inf.",
        ),
        Rung(
            name="online",
            kernels=("attention_online",),
            launch=lambda runner, qkv: launch.attention(runner, qkv, HEADS)[0],
            change="A warp takes one query and walks over its keys with a running maximum, sum and result in "
            "registers: no score reaches memory, and none behind the query is computed. Each key costs a sum over "
            "the warp, five shuffles, and is read again by every query: tiles in shared memory and tensor cores are "
            "the next steps (docs/attention.md).",
        ),
    ),
)
ATTENTION_BACKWARD = Ladder(
    **of_transformer("attention_backward", "the gradients of queries, keys and values"),
    reference=gradients(functools.partial(_attend, heads=HEADS), 1),
    inputs=_attention_backward_inputs,
    cost=lambda shape, dtype: words(
        5 * _attention_words(shape), 3 * _attention_words(shape), 10 * _pairs(shape) * shape["head_dim"]
    ),
    shapes=ATTENTION_SHAPES,
    test_shapes=ATTENTION_TESTS,
    rungs=(
        Rung(
            name="recomputed",
            kernels=("attention_backward_dots", "attention_backward_q", "attention_backward_kv"),
            launch=launch.attention_backward,
            change="Weights are computed again from queries, keys and the kept logarithm of their sum, one number a "
            "row instead of the matrix. A query's warp makes its own gradient, a key's warp walks over the queries "
            "behind it and makes those of key and value: twice the products, and no atomic addition.",
        ),
    ),
)
