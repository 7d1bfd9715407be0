"""Pack the linear layers of a model to a few bits, and put them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sublight.errors import BadInput, nearest
from sublight.fix.compressed import Compressed
from sublight.fix.layers import replace_layers, restore_layers
from sublight.fix.quantize import coded
from sublight.fix.quantize.coded import CodedLinear
from sublight.fix.quantize.linear import PackedLinear
from sublight.ops.matmul.packing import BITS, check_group, quantize_weight, stored_above

MOST_STRETCH = 1 + 2**-6  # of a step, for a scale that its data type can hold: bfloat16 needs up to 1 + 2**-7
PACKED = {f"w{bits}a16": bits for bits in reversed(BITS)}
CODED: dict[str, coded.Kind] = {"w8a8": "int8", "fp8": "fp8"}
WAYS = (*PACKED, *CODED)


def quantize(
    model: torch.nn.Module,
    how: str = "w4a16",
    *,
    group: int = 128,
    skip: Sequence[str] | None = None,
    verify: Any = None,
    rounds: int = 20,
    keep: bool = True,
) -> Compressed:
    """Pack the model's linear layers, in place, and say what was done.

    w8a16 to w1a16 pack weights in groups; w8a8 (int8) and fp8 code weights and, as they come, activations in 8 bits.
    `skip` are names or patterns of layers to leave ("*.down_proj"); unless it is given, the output head is left, whose
    error goes straight into the loss. `verify` is a batch: the change of its loss, or of its outputs, is reported.
    `rounds` fit the zeros to the weights; `keep=False` gives up the weights as they were, and with them the way back.
    """
    if how not in WAYS:
        raise BadInput(f"unknown way {how!r}: {nearest(str(how), list(WAYS))}")
    if type(group) is not int or group < 1:
        raise BadInput(f"group={group!r}: a whole number of weights that share a scale, such as 128")
    if type(rounds) is not int or rounds < 0:
        raise BadInput(f"rounds={rounds!r}: a whole number of rounds in which zeros are fitted, such as 20")
    given: dict[str, Any] = {"caller": "quantize", "how": how, "verb": "packed"}
    given |= {"skip": skip, "verify": verify, "keep": keep}
    if how in CODED:
        kind = CODED[how]
        return replace_layers(
            model,
            by=lambda module, weight: CodedLinear.of(weight, module.bias, kind),  # type: ignore[arg-type]
            why_left=coded.why_left,
            words=_words,
            **given,
        )
    bits = PACKED[how]

    def why_left(weight: torch.Tensor) -> str:
        try:
            check_group(weight.shape[1], group, bits)
        except BadInput as error:
            return str(error)
        return why_too_coarse(weight, bits, group)

    return replace_layers(
        model,
        by=lambda module, weight: _packed(weight, module.bias, bits, group, rounds),  # type: ignore[arg-type]
        why_left=why_left,
        words=lambda new: f"{bits} bits, groups of {group}",
        **given,
    )


def pack_weight(
    weight: torch.Tensor, bias: torch.Tensor | None, how: str, *, group: int = 128, rounds: int = 20
) -> PackedLinear | CodedLinear:
    """One weight (out, in) packed as `quantize` packs a layer's; what it would leave is refused."""
    if how not in WAYS:
        raise BadInput(f"unknown way {how!r}: {nearest(how, list(WAYS))}")
    held = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    if how in CODED:
        if reason := coded.why_left(weight):
            raise BadInput(f"{how} does not take a weight {tuple(weight.shape)}: {reason}")
        return CodedLinear.of(weight, held, CODED[how])
    bits = PACKED[how]
    check_group(weight.shape[1], group, bits)
    if reason := why_too_coarse(weight, bits, group):
        raise BadInput(f"{how} does not take a weight {tuple(weight.shape)}: {reason}")
    return _packed(weight, held, bits, group, rounds)


def _packed(weight: torch.Tensor, bias: Any, bits: int, group: int, rounds: int) -> PackedLinear:
    packed, scales, zeros = quantize_weight(weight, bits, group, rounds=rounds if bits < 8 else 0)
    return PackedLinear(packed, scales, zeros, bias, bits=bits, in_features=weight.shape[1])


def why_too_coarse(weight: torch.Tensor, bits: int, group: int) -> str:
    """Why scales and zeros of the weight's own data type cannot hold its groups to half a step; empty where they can.

    The least scale of float16 is 6e-8, and bfloat16 has no odd numbers beyond 256.
    """
    grouped = weight.detach().float().reshape(weight.shape[0], -1, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    low, high = (x[high > low] for x in (low, high))  # a group of one value is its own scale
    wanted = (high - low) / (2**bits - 1)
    scale = stored_above(wanted, weight.dtype)
    zero = -low / scale
    zero_off = (zero.to(weight.dtype).float() - zero).abs()
    if bool((scale <= MOST_STRETCH * wanted).all() and (zero_off <= 0.5).all()):
        return ""
    dtype = str(weight.dtype).removeprefix("torch.")
    return f"scales in {dtype} are too coarse for groups of its weights: pack it in float32"


def _words(new: Any) -> str:
    reason = coded.why_whole(new.kind, new.codes.device)
    by = "torch._int_mm" if new.kind == "int8" else "torch._scaled_mm"
    how = f"made whole: {reason}" if reason else f"by {by}: no {new.kind} product of ours"
    return f"{new.kind}, a scale for each output and token; {how}"


def unquantize(model: torch.nn.Module) -> int:
    """Put the layers back as they were; how many were packed."""
    return restore_layers(model, (PackedLinear, CodedLinear))
