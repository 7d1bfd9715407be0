"""On paper: the sum and maximum of two pieces of a row, put together."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape
from sublight.learn.record import Exercise, Problem


def problem() -> Problem:
    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        import torch

        luck = torch.Generator().manual_seed(seed)
        pieces = [torch.randn(shape[name], generator=luck) * 4 for name in ("left", "right")]
        tops = [piece.max() for piece in pieces]
        totals = [torch.exp(piece - top).sum() for piece, top in zip(pieces, tops, strict=True)]
        return torch.stack(tops), torch.stack(totals)

    return Problem(reference=reference, inputs=inputs)


def reference(tops: Any, totals: Any) -> Any:
    """PyTorch's own sum of exponentials over both."""
    import torch

    top = tops.max()
    return top, torch.exp(torch.logsumexp(tops + torch.log(totals), 0) - top)


ONLINE_BY_HAND = Exercise(
    name="online_by_hand",
    chapter="rows",
    problem=problem,
    cost=lambda shape, dtype: Cost(read_bytes=0, write_bytes=0),
    arguments=("tops", "totals"),
    outputs=("top", "total"),
    sizes={"left": (1, 50), "right": (1, 50)},
    shown={"left": 3, "right": 2},
    goal=None,
    needs=("softmax",),
    kind="paper",
    dtypes=("float32",),
)
