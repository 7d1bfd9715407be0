"""A linear layer of which every four weights along a row hold two zeros."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from sublight.ops.sparse.sparsify_24 import sparsify_24, unpack_24

SPARSE_DTYPES = (torch.float16, torch.bfloat16)
LEAST_CAPABILITY = 8  # Ampere has the first sparse tensor cores
MULTIPLE = (32, 64)  # of rows and columns that both of PyTorch's ways take


def why_dense(weight: torch.Tensor) -> str:
    """Why PyTorch's sparse product does not take a weight; empty where it does."""
    if not weight.is_cuda or torch.version.hip:
        return f"no sparse tensor cores on this device ({weight.device.type})"
    if torch.cuda.get_device_capability(weight.device)[0] < LEAST_CAPABILITY:
        return "no sparse tensor cores before sm_80"
    if weight.dtype not in SPARSE_DTYPES:
        return f"its data type is {str(weight.dtype).removeprefix('torch.')}: sparse products are for fp16 and bf16"
    if any(size % each for size, each in zip(weight.shape, MULTIPLE, strict=True)):
        return f"{weight.shape[0]}x{weight.shape[1]} is no multiple of {MULTIPLE[0]}x{MULTIPLE[1]}"
    return ""


class SparseLinear(torch.nn.Module):
    """x @ weight.T + bias, two zeros in every four of the weight.

    The weight is kept once, in the form that is multiplied: PyTorch's compressed one (9/16 of the bytes) where the GPU
    has sparse tensor cores, else dense with its zeros. It is for inference; a model that is moved chooses anew.
    """

    is_trained = False

    def __init__(self, weight: torch.Tensor, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.why = ""  # it is dense
        self.bias = bias
        self._keep(masked_24(weight))

    def _keep(self, dense: torch.Tensor) -> None:
        self.why = why_dense(dense)
        weight = dense if self.why else _compressed(dense)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)

    @property
    def dense(self) -> torch.Tensor:
        """The weight with its zeros."""
        return self.weight.detach() if self.why else self.weight.to_dense()

    @property
    def like(self) -> torch.Tensor:
        return self.weight

    @property
    def nbytes(self) -> int:
        if self.why:
            return self.weight.nbytes
        parts = (getattr(self.weight, name, None) for name in ("packed", "meta", "packed_t", "meta_t"))
        return sum(part.nbytes for part in parts if part is not None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.why or (torch.is_grad_enabled() and x.requires_grad):  # the compressed weight has no gradient for x
            return F.linear(x, self.dense, self.bias)
        rows = x.reshape(-1, x.shape[-1])
        return F.linear(rows, self.weight, self.bias).view(*x.shape[:-1], self.out_features)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> SparseLinear:
        if not self.why:
            self.weight = torch.nn.Parameter(self.dense, requires_grad=False)
        super()._apply(fn, recurse)
        if self.weight.device.type != "meta":
            self._keep(self.weight.detach())
        return self

    def extra_repr(self) -> str:
        form = f"dense: {self.why}" if self.why else "compressed"
        return f"in_features={self.in_features}, out_features={self.out_features}, {form}"


def masked_24(weight: torch.Tensor) -> torch.Tensor:
    """The weight with zeros in place of the two smallest of every four."""
    packed, meta = sparsify_24(weight.detach())
    return unpack_24(packed, meta, weight.shape[1])


def _compressed(dense: torch.Tensor) -> torch.Tensor:
    from torch.sparse import to_sparse_semi_structured

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that its interface may change: `why_dense` is all that we use
        return to_sparse_semi_structured(dense.contiguous())  # type: ignore[no-any-return]
