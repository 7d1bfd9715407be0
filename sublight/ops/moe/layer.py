"""A mixture of experts as a layer: the router's softmax, the largest of it, and the experts that these name."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sublight.errors import BadInput
from sublight.ops.moe.moe_experts import moe_experts
from sublight.ops.softmax.softmax_topk import MAX_K, softmax_topk


def route(logits: torch.Tensor, top_k: int, *, normalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts (…, top_k) and what each counts for, in fp32: the largest of the softmax over the logits
    (…, experts), of which `normalize` makes the sum 1."""
    weights, index = softmax_topk(logits.float(), top_k)
    return index, weights / weights.sum(-1, keepdim=True) if normalize else weights


class MoE(torch.nn.Module):
    """Every token goes to the `top_k` experts that the router likes best, each a SwiGLU block of its own.

    Parameters are laid out as Mixtral's and Qwen's in transformers: `router` (experts, hidden), `gate_up` (experts,
    2 * inner, hidden), gate first, and `down` (experts, hidden, inner).
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        top_k: int,
        *,
        normalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if min(hidden, inner, experts) < 1:
            raise BadInput(f"MoE of hidden {hidden}, inner {inner}, {experts} experts: each is at least 1")
        if not 1 <= top_k <= min(experts, MAX_K):
            raise BadInput(f"top_k is {top_k}: give 1 to {min(experts, MAX_K)}, for {experts} experts")
        self.top_k, self.normalize = top_k, normalize

        def matrix(*sizes: int) -> torch.nn.Parameter:
            bound = sizes[-1] ** -0.5  # as torch.nn.Linear begins
            return torch.nn.Parameter(torch.empty(sizes, device=device, dtype=dtype).uniform_(-bound, bound))

        self.router = matrix(experts, hidden)
        self.gate_up = matrix(experts, 2 * inner, hidden)
        self.down = matrix(experts, hidden, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index, weights = route(F.linear(x, self.router), self.top_k, normalize=self.normalize)
        if torch.is_autocast_enabled(x.device.type):
            kind = torch.get_autocast_dtype(x.device.type)
            return moe_experts(x.to(kind), index, weights, self.gate_up.to(kind), self.down.to(kind))
        return moe_experts(x, index, weights, self.gate_up, self.down)

    def extra_repr(self) -> str:
        experts, hidden, inner = self.down.shape
        return f"hidden={hidden}, inner={inner}, experts={experts}, top_k={self.top_k}, normalize={self.normalize}"
