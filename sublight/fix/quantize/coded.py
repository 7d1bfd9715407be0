"""A linear layer whose weight and whose inputs are 8-bit codes: int8 or fp8, a scale for each output and each token."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F

from sublight.backend import private
from sublight.errors import BadInput
from sublight.ops.quantize.quantize import quantize_fp8, quantize_int8

Kind = Literal["int8", "fp8"]
MULTIPLE = 16  # of both sizes of a weight, for PyTorch's 8-bit products
MOST_INPUTS = 2**17  # 127 * 127 * inputs must stay below 2**31
LEAST_ROWS = 32  # of torch._int_mm on a GPU: it takes more than 16, and fewer are padded
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def why_left(weight: torch.Tensor) -> str:
    """Why PyTorch's 8-bit products do not take a weight; empty where they do."""
    if any(size % MULTIPLE for size in weight.shape):
        return f"{weight.shape[0]}x{weight.shape[1]}: 8-bit products take multiples of {MULTIPLE}"
    return "" if weight.shape[1] <= MOST_INPUTS else f"more than {MOST_INPUTS} inputs pass what int32 holds"


def why_whole(kind: Kind, device: torch.device) -> str:
    """Why codes are made whole and multiplied so on a device; empty where it multiplies them as they are."""
    if device.type == "cpu" or (device.type == "cuda" and torch.version.hip is None):
        least = {"int8": (7, 5), "fp8": (8, 9)}[kind]
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < least:
            return f"no {kind} tensor cores before sm_{least[0]}{least[1]}"
        return ""
    return f"no {kind} products of PyTorch's on {device.type}"


class CodedLinear(torch.nn.Module):
    """x @ weight.T + bias; each token is quantized when it comes, by our quantize ops. Gradients for x pass as if
    nothing had been rounded."""

    codes: torch.Tensor
    scales: torch.Tensor
    like: torch.Tensor
    is_trained = False

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, bias: torch.nn.Parameter | None, *, kind: Kind
    ) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("like", scales.new_empty(0), persistent=False)  # of the weight as it was
        self.bias, self.kind = bias, kind
        self.out_features, self.in_features = codes.shape

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.nn.Parameter | None, kind: Kind) -> CodedLinear:
        codes, scales = _quantized(weight.detach().contiguous(), kind)
        coded = cls(codes, scales, bias, kind=kind)
        coded.like = weight.new_empty(0)
        return coded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        if x.shape[-1] != self.in_features:
            raise BadInput(f"a quantized layer of {self.in_features} inputs was given {tuple(x.shape)}")
        if torch.jit.is_tracing():  # type: ignore[attr-defined]  # which does not take an autograd.Function
            if torch.is_grad_enabled() and x.requires_grad:
                raise BadInput(f"a layer in {self.kind} is traced without gradients: trace it under torch.no_grad()")
            y = self.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.out_features)
        else:
            y = _StraightThrough.apply(x, self)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (rows, inputs) quantized and multiplied, without the bias."""
        if x.numel() == 0 or why_whole(self.kind, x.device):
            codes, scales = _quantized(x, self.kind) if x.numel() else (x, x.new_ones(x.shape[0]))
            whole = codes.float() @ self.codes.float().T
            return (whole * scales.float()[:, None] * self.scales).to(x.dtype)
        codes, scales = _quantized(x, self.kind)
        if self.kind == "int8":
            rows = codes.shape[0]
            if codes.is_cuda and rows < LEAST_ROWS:
                codes = F.pad(codes, (0, 0, 0, LEAST_ROWS - rows))
            sums: torch.Tensor = private.int_mm(codes, self.codes.T)[:rows]
            return (sums * (scales.float()[:, None] * self.scales)).to(x.dtype)
        if x.dtype == torch.bfloat16 and x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9:
            by_row, by_col = scales.float()[:, None].contiguous(), self.scales[None, :].contiguous()
            y: torch.Tensor = private.scaled_mm(codes, self.codes.T, scale_a=by_row, scale_b=by_col, out_dtype=x.dtype)
            return y
        one = scales.new_ones(
            (), dtype=torch.float32
        )  # scales by row come out in bf16 alone, and on a CPU not in every PyTorch
        sums = private.scaled_mm(codes, self.codes.T, scale_a=one, scale_b=one, out_dtype=torch.float32)
        return (sums * (scales.float()[:, None] * self.scales)).to(x.dtype)

    @property
    def weight(self) -> torch.Tensor:
        """Made whole: for code that looks at a layer's weight. It is a copy, so nothing that is done to it lasts."""
        return self.codes.float() * self.scales[:, None]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def _apply(self, fn: Any, recurse: bool = True) -> CodedLinear:
        """Codes and scales are moved, and keep their data types: `model.half()` is about activations."""
        codes, scales = self.codes, self.scales
        super()._apply(fn, recurse)
        device = self.scales.device
        self.codes, self.scales = codes.to(device), scales.to(device)
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kind={self.kind}"


class _StraightThrough(torch.autograd.Function):
    """The layer's product; backward as if the weight had been multiplied with x itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: CodedLinear) -> torch.Tensor:
        ctx.layer = layer
        return layer.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return dy @ ctx.layer.weight.to(dy.dtype), None


def _quantized(x: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and a scale for each row in fp32."""
    codes, scales = quantize_int8(x) if kind == "int8" else quantize_fp8(x)
    return codes, scales.reshape(-1).float()
