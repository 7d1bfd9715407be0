"""What the transformer's ladders share: inputs, costs in words, gradients by PyTorch's autograd as the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sublight.correct import Call
from sublight.cost import Cost
from sublight.extensions.transformer import launch

if TYPE_CHECKING:
    from torch import Tensor

WORD = 4  # bytes in a float32


def drawn(device: str, seed: int) -> Callable[..., Tensor]:
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    return functools.partial(torch.randn, device=device, generator=generator)


def whole(shape: tuple[int, ...], below: int, device: str, seed: int) -> Tensor:
    import torch

    return torch.randint(below, shape, device=device, generator=torch.Generator(device).manual_seed(seed + 1))


def gradients(call: Callable[..., Tensor], wanted: int) -> Call:
    """(d_out, *inputs) -> the gradients of the first `wanted` inputs, by PyTorch's autograd."""

    def backward(d_out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        import torch

        leaves = [each.detach().requires_grad_() for each in inputs[:wanted]]
        with torch.enable_grad():
            out = call(*leaves, *inputs[wanted:])
        return torch.autograd.grad(out, leaves, d_out)

    return backward


def words(read: float, written: float, flops: float = 0.0) -> Cost:
    """Words of 4 bytes read and written."""
    return Cost(
        read_bytes=int(WORD * read), write_bytes=int(WORD * written), flops={"vector_fp32": flops} if flops else {}
    )


def of_transformer(name: str, summary: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "source": launch.SOURCE, "library": launch.KERNELS, "summary": summary, **fields}
