"""How a folder's products are packed, by its `quantization_config`; what would be read as noise is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sublight.errors import BadInput

Method = Literal["", "awq", "gptq", "gptq_v2", "fp8"]  # gptq keeps zeros less one
KNOWN = "`generate` knows awq and gptq with 4 bits, fp8, and compressed-tensors' float-quantized"
STRATEGIES = ("tensor", "channel", "block")  # what shares a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    method: Method = ""  # "": weights are as they are
    block: tuple[int, int] | None = None  # of outputs and inputs that share a scale in fp8; None: a tensor or a row

    @property
    def is_four_bits(self) -> bool:
        return self.method in ("awq", "gptq", "gptq_v2")


UNPACKED = Packing()


def read(how: Mapping[str, Any], source: str) -> Packing:
    if not how:
        return UNPACKED
    method = how.get("quant_method")
    if method == "fp8":
        if how.get("fmt", "e4m3") != "e4m3":
            raise BadInput(f"{source} is packed in fp8 of fmt {how['fmt']!r}: `generate` knows e4m3")
        return Packing(method="fp8", block=_block(how.get("weight_block_size"), source))
    if method == "compressed-tensors":
        return _compressed(how, source)
    bits = how.get("bits", how.get("w_bit"))
    if method not in ("awq", "gptq") or bits != 4:
        raise BadInput(f"{source} is packed by {method} with {bits} bits: {KNOWN}")
    if method == "awq" and str(how.get("version", "gemm")).lower() != "gemm":
        raise BadInput(f"{source} is awq in version {how['version']!r}: `generate` knows gemm")
    return Packing(method="gptq_v2" if how.get("checkpoint_format") == "gptq_v2" else method)


def _compressed(how: Mapping[str, Any], source: str) -> Packing:
    """One or several groups of layers; the files say by their data types which layers are packed."""
    groups = how.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise BadInput(f"{source} is packed by compressed-tensors without config_groups: fetch the model again")
    for form in (how.get("format"), *(group.get("format") or "float-quantized" for group in groups.values())):
        if form != "float-quantized":
            raise BadInput(f"{source} is packed by compressed-tensors as {form}: {KNOWN}")
    for name, plain in (("sparsity_config", "dense"), ("transform_config", None)):
        if (more := how.get(name)) and (plain is None or not isinstance(more, dict) or more.get("format") != plain):
            raise BadInput(f"{source} has a {name}, which `generate` does not compute")
    blocks = set()
    for weights in (group["weights"] for group in groups.values() if group.get("weights")):
        is_float8 = isinstance(weights, dict) and (weights.get("type"), weights.get("num_bits")) == ("float", 8)
        if not is_float8 or weights.get("symmetric", True) is not True or weights.get("strategy") not in STRATEGIES:
            raise BadInput(f"{source} has weights packed as {str(weights)[:80]}: {KNOWN} by {', '.join(STRATEGIES)}")
        if weights["strategy"] == "block":
            blocks.add(_block(weights.get("block_structure") or 0, source))
    if len(blocks) > 1:
        raise BadInput(f"{source} has fp8 weights in blocks of several sizes: `generate` knows one")
    return Packing(method="fp8", block=blocks.pop() if blocks else None)


def _block(sizes: Any, source: str) -> tuple[int, int] | None:
    """
    >>> _block([128, 128], "here"), _block(None, "here")
    ((128, 128), None)
    """
    if sizes is None:
        return None
    if isinstance(sizes, list | tuple) and len(sizes) == 2 and all(type(each) is int and each > 0 for each in sizes):
        return sizes[0], sizes[1]
    raise BadInput(f"{source} has fp8 weights in blocks of {str(sizes)[:40]!r}, which are not two whole numbers")
