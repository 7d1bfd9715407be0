"""On paper: from an index to an address, for a tensor and for its transpose."""

from __future__ import annotations

from typing import Any

from sublight.correct import Inputs
from sublight.cost import Cost, Shape
from sublight.learn.record import Exercise, Problem


def problem() -> Problem:
    def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
        import torch

        sizes = torch.tensor([shape["planes"], shape["rows"], shape["cols"]])
        luck = torch.Generator().manual_seed(seed)
        index = torch.cat([torch.randint(int(size), (1,), generator=luck) for size in sizes])
        return sizes, index

    return Problem(reference=reference, inputs=inputs)


def reference(sizes: Any, index: Any) -> Any:
    """PyTorch's own strides of a contiguous tensor and of its transpose, and where it keeps the element."""
    import torch

    tensor = torch.arange(int(sizes.prod()), dtype=torch.float64).view(*sizes.tolist())
    own, turned = tensor.stride(), tensor.transpose(1, 2).stride()
    return torch.tensor(own).double(), tensor[tuple(index.tolist())].clone(), torch.tensor(turned).double()


STRIDES = Exercise(
    name="strides",
    chapter="first",
    problem=problem,
    cost=lambda shape, dtype: Cost(read_bytes=0, write_bytes=0),
    arguments=("sizes", "index"),
    outputs=("own", "place", "turned"),
    sizes={"planes": (1, 9), "rows": (1, 40), "cols": (1, 40)},
    shown={"planes": 2, "rows": 3, "cols": 4},
    goal=None,
    needs=("copy",),
    kind="paper",
    dtypes=("float64",),
)
