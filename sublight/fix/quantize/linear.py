"""A linear layer whose weight is packed."""

from __future__ import annotations

import torch

from sublight.errors import BadInput
from sublight.ops.matmul.low_bit_matmul import low_bit_matmul
from sublight.ops.matmul.packing import dequantize


class PackedLinear(torch.nn.Module):
    """x @ weight.T + bias, with the weight as `quantize_weight` packs it."""

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    is_trained = False

    def __init__(
        self,
        packed: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        bias: torch.nn.Parameter | None,
        *,
        bits: int,
        in_features: int,
    ) -> None:
        super().__init__()
        for name, x in (("packed", packed), ("scales", scales), ("zeros", zeros)):
            self.register_buffer(name, x)
        self.bias = bias
        self.bits, self.in_features, self.out_features = bits, in_features, packed.shape[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        if x.shape[-1] != self.in_features:
            raise BadInput(f"a packed layer of {self.in_features} inputs was given {tuple(x.shape)}")
        y = low_bit_matmul(x, self.packed, self.scales.to(x.dtype), self.zeros.to(x.dtype), self.bits)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """Made whole: for code that looks at a layer's weight. It is a copy, so nothing that is done to it lasts."""
        return dequantize(self.packed, self.scales, self.zeros, self.bits, self.in_features)

    @property
    def like(self) -> torch.Tensor:
        return self.scales

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.packed, self.scales, self.zeros))

    def extra_repr(self) -> str:
        group = self.in_features // self.scales.shape[1]
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, group={group}"
