"""How many FLOPs a second this machine's matrix products reach: as `sublight limits` measured, else the vendor's."""

from __future__ import annotations

from dataclasses import dataclass

from sublight import gpus
from sublight.limits import run

KINDS = {"bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductLimit:
    flops_per_s: float
    source: str  # "measured", "vendor's figure"


def product_limit(device: str, dtype: str, threads: int) -> ProductLimit | None:
    """None where nobody has measured, and no vendor's figure is known: so for a CPU that is new."""
    machine = run.this_machine("cuda" if device == "cuda" else "cpu", threads=None if device == "cuda" else threads)
    found = run.cached(machine)
    if found and (rate := found.value(f"matmul_{KINDS[dtype]}")):
        return ProductLimit(flops_per_s=rate, source="measured")
    if machine.gpu is None:
        return None
    try:
        return ProductLimit(
            flops_per_s=gpus.theoretical_peak(machine.gpu, KINDS[dtype]).value, source="vendor's figure"
        )
    except gpus.UnknownFigure:
        return None
