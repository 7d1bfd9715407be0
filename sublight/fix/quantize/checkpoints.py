"""Weights that others packed to four bits, AWQ's and GPTQ's, in our packing; and to fp8, made whole.

Both keep them as (in, out). GPTQ puts eight neighbours along the inputs into a word, the lowest first, AWQ eight along
the outputs, in the order 0 2 4 6 1 3 5 7. Zeros lie along the outputs as AWQ's weights do, or plainly for GPTQ, which
keeps them less one. GPTQ may take inputs in the order of their activations: `g_idx` says which group each belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sublight.errors import BadInput
from sublight.fix.quantize.linear import PackedLinear
from sublight.ops.matmul.packing import check_group, pack

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BITS = 4


def _nibbles(words: torch.Tensor, dim: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Eight values of each word, along a dimension; the value at place i of a word belongs at `order[i]`."""
    places = 4 * torch.arange(8, dtype=torch.int32, device=words.device)
    values = (words.unsqueeze(-1) >> places) & 15
    back = torch.empty_like(values)
    back[..., list(order)] = values
    return back.flatten(1) if dim == 1 else back.transpose(1, 2).flatten(0, 1)


def from_gptq(tensors: Mapping[str, torch.Tensor], *, zeros_less_one: bool = True) -> PackedLinear:
    """A layer's `qweight`, `qzeros`, `scales`, and, where there are, `g_idx` and `bias`."""
    qweight, qzeros, scales = _three(tensors, "GPTQ")
    values = _nibbles(qweight, 0)  # (in, out)
    zeros = _nibbles(qzeros, 1) + int(zeros_less_one)
    k, per_group = len(values), _group(values, zeros, scales)
    group = tensors.get("g_idx")
    in_order = torch.arange(k, device=values.device) // per_group
    if group is not None and not torch.equal(group.to(in_order.dtype), in_order):
        raise BadInput(
            "this GPTQ layer takes its inputs in another order (desc_act): export it without, or keep it whole"
        )
    return _layer(values, zeros, scales, tensors.get("bias"))


def from_awq(tensors: Mapping[str, torch.Tensor]) -> PackedLinear:
    """A layer's `qweight`, `qzeros`, `scales`, and, where there is one, `bias`."""
    qweight, qzeros, scales = _three(tensors, "AWQ")
    return _layer(_nibbles(qweight, 1, AWQ_ORDER), _nibbles(qzeros, 1, AWQ_ORDER), scales, tensors.get("bias"))


def from_fp8(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None = None) -> torch.Tensor:
    """A weight (out, in) in fp32: each code times its scale, which is one for all, for a row, or for a block of outputs
    and inputs (the last of which may be cut off).

    >>> codes = torch.ones(2, 3).to(torch.float8_e4m3fn)
    >>> from_fp8(codes, torch.tensor([[2.0, 3.0]]), (2, 2))
    tensor([[2., 2., 3.],
            [2., 2., 3.]])
    """
    rows, cols = codes.shape
    weight, by = codes.float(), scales.float()
    if by.numel() == 1:
        return weight * by.reshape(())
    if by.shape in ((rows, 1), (rows,)):
        return weight * by.reshape(rows, 1)
    if block is None or by.shape != (-(-rows // block[0]), -(-cols // block[1])):
        of = "rows" if block is None else f"rows, or of blocks of {block[0]}x{block[1]}"
        raise BadInput(f"scales {tuple(scales.shape)} are not those of {of} of a weight {(rows, cols)}")
    return weight * by.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :cols]


def _three(tensors: Mapping[str, torch.Tensor], kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if missing := [name for name in ("qweight", "qzeros", "scales") if name not in tensors]:
        raise BadInput(f"an {kind} layer has qweight, qzeros and scales; {', '.join(missing)} is not here")
    if tensors["qweight"].dtype != torch.int32 or tensors["qzeros"].dtype != torch.int32:
        raise BadInput(f"an {kind} layer's qweight and qzeros are int32, not {tensors['qweight'].dtype}")
    three = tensors["qweight"], tensors["qzeros"], tensors["scales"]
    if any(x.dim() != 2 for x in three):
        raise BadInput(f"an {kind} layer's qweight, qzeros and scales are matrices: {[tuple(x.shape) for x in three]}")
    return three


def _group(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> int:
    """How many inputs share a scale, of weights (in, out), zeros and scales (groups, out)."""
    (k, n), groups = values.shape, len(scales)
    if groups == 0 or scales.shape != (groups, n) or zeros.shape != (groups, n) or k % groups:
        raise BadInput(
            f"weights {tuple(values.shape)}, zeros {tuple(zeros.shape)}, scales {tuple(scales.shape)} do not fit"
        )
    check_group(k, k // groups, BITS)
    return k // groups


def _layer(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """From weights (in, out), zeros and scales (groups, out)."""
    _group(values, zeros, scales)
    return PackedLinear(
        pack(values.T, BITS),
        scales.T.contiguous(),
        zeros.T.to(scales.dtype).contiguous(),
        None if bias is None else torch.nn.Parameter(bias, requires_grad=False),
        bits=BITS,
        in_features=len(values),
    )
