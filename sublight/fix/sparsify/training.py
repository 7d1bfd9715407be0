"""A linear layer that is trained with two zeros in every four weights, chosen anew in every step.

The weight that the optimizer has stays dense. A forward pass makes W and its transpose sparse at once, with the same
zeros: the first is multiplied there, the second in backward for the input's gradient. Together they take 9/8 of the
weight's bytes until backward has run. The weight's own gradient is that of the dense product: a weight that is zero in
this step still learns, and may come back.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from sublight.backend import private
from sublight.fix.sparsify.linear import why_dense
from sublight.ops.sparse.sparsify_24 import sparsify_24, unpack_24

BLOCK = 4  # both ways
CAPABILITY = 8  # of the GPUs whose form PyTorch's pass writes: an H200 (9) read it as other weights, without an error
TILE = 128  # of rows and columns that PyTorch's pass over both takes
WHILE_IT_RUNS = 9 / 8  # of the weight's bytes: W and its transpose, half of the values and 1/16 for their places each


class SparseTrainingLinear(torch.nn.Module):
    """x @ two_of_four(weight).T + bias, with the weight and bias of the layer whose place it takes."""

    is_trained = True

    def __init__(self, weight: torch.nn.Parameter, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias

    @property
    def why(self) -> str:
        """Why its products are dense ones, zeros included; empty where the sparse tensor cores do them."""
        return why_not_both(self.weight)

    @property
    def like(self) -> torch.Tensor:
        return self.weight

    @property
    def nbytes(self) -> int:
        """While a step runs: the dense weight, and what is multiplied."""
        return self.weight.nbytes + int((1.0 if self.why else WHILE_IT_RUNS) * self.weight.nbytes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
        rows = x.reshape(-1, x.shape[-1])
        y: torch.Tensor = _Product.apply(rows, weight)  # type: ignore[no-untyped-call]
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        form = f"dense: {self.why}" if self.why else "sparse"
        return f"in_features={self.in_features}, out_features={self.out_features}, {form}"


def why_not_both(weight: torch.Tensor) -> str:
    """Why PyTorch's sparse products do not take a weight and its transpose; empty where they do."""
    if why := why_dense(weight):
        return why
    if (capability := torch.cuda.get_device_capability(weight.device))[0] != CAPABILITY:
        return f"PyTorch makes both ways sparse for sm_8x alone, this is sm_{capability[0]}{capability[1]}"
    rows, cols = weight.shape
    return f"{rows}x{cols} is no multiple of {TILE}x{TILE}" if rows % TILE or cols % TILE else ""


def both_ways(weight: torch.Tensor) -> torch.Tensor:
    """The weight with two zeros in every four of its rows and of its columns: in PyTorch's compressed form, with its
    transpose, where the GPU multiplies that; else dense."""
    weight = weight.detach()
    if why_not_both(weight):
        packed, meta, *_ = sparsify_24(weight.contiguous(), both=True)
        return unpack_24(packed, meta, weight.shape[1])
    from torch.sparse import SparseSemiStructuredTensorCUSPARSELT, semi_structured

    takes_cusparselt = not private.find("force_cutlass")  # a script may set it anew
    kind: Any = SparseSemiStructuredTensorCUSPARSELT
    kind = kind if takes_cusparselt else semi_structured.SparseSemiStructuredTensorCUTLASS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that its interface may change
        return kind.prune_dense_static_sort(weight.contiguous())  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """Tokens (rows, inputs) by the sparse weight; outputs lie contiguously, as collectives want them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        sparse = both_ways(weight)
        ctx.sparse = sparse
        ctx.save_for_backward(x)
        return F.linear(x, sparse).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.mm(dy, ctx.sparse).contiguous() if ctx.needs_input_grad[0] else None
        dw = dy.T @ x if ctx.needs_input_grad[1] else None
        return dx, dw
