"""What the exercises on attention share: one batch entry of the op, and PyTorch's rounding on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sublight.cost import Cost, Shape
from sublight.cost import find as find_cost
from sublight.learn.record import Problem, problem_of


def of_op(shape: Shape, *, causal: bool) -> Shape:
    """As the op names the dimensions."""
    return {
        "batch": 1, "heads": shape["heads"], "kv_heads": shape["heads"], "q_len": shape["q_len"],
        "kv_len": shape.get("kv_len", shape["q_len"]), "head_dim": shape["head_dim"], "causal": int(causal),
    }  # fmt: skip


def cost_of(shape: Shape, dtype: str, *, causal: bool) -> Cost:
    return find_cost("attention")(of_op(shape, causal=causal), dtype, "fwd")


def weights_of(q: Any, k: Any, *, causal: bool) -> tuple[Any, Any]:
    """Softmax of the scores, and the logarithm of each query's sum; in float32 for narrower types."""
    import torch

    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return torch.softmax(scores, -1), torch.logsumexp(scores, -1)


def composed(q: Any, k: Any, v: Any, *, causal: bool) -> Any:
    """PyTorch's composition on a GPU: sums in float32; of 16-bit inputs the weights are rounded before the product."""
    return weighted(weights_of(q, k, causal=causal)[0], v, q.dtype)


def weighted(weights: Any, v: Any, kind: Any) -> Any:
    """The product with v; weights are rounded to the inputs' type before it."""
    return (weights.to(kind).to(weights.dtype) @ v.to(weights.dtype)).to(kind)


def problem(*, causal: bool = False) -> Problem:
    def around(reference: Callable[..., Any]) -> Callable[..., Any]:
        """The op's own in float64, one batch entry of it; else the composition."""

        def call(q: Any, k: Any, v: Any) -> Any:
            import torch

            if q.dtype == torch.float64:
                return reference(q[None], k[None], v[None], causal=causal)[0]
            return composed(q, k, v, causal=causal)

        return call

    return problem_of(
        "attention",
        arrange=lambda *tensors: tuple(x[0] for x in tensors),
        shape_of=partial(of_op, causal=causal),
        around=around,
    )
