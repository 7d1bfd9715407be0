"""Data types side by side: what a step takes in each, and what each cost a small model in accuracy, where measured.

The accuracy is a fact about the small model of `low_bit_accuracy.json`, which is a copy of
benchmarks/low_bit_accuracy_h200.json, never about the model that is asked for: every way out says so.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sublight.cost.dtypes import find_dtype, matmul_limit
from sublight.predict import estimate
from sublight.predict.estimate import Prediction
from sublight.predict.machine import Machine
from sublight.predict.model import Model
from sublight.predict.operation import GROUP
from sublight.predict.step import Precision, Step

CHOICES = (  # products, weights
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
    ("int8", "int8"),
    ("float8_e4m3fn", "float8_e4m3fn"),
    ("float4_e2m1fn", "float4_e2m1fn"),
)
MEASURED = {  # how benchmarks/low_bit_accuracy.py calls it, and the weights that share a scale
    ("bfloat16", "bfloat16"): ("as it is", 0),
    ("bfloat16", "int8"): ("w8a16", GROUP),
    ("bfloat16", "int4"): ("w4a16", GROUP),
    ("int8", "int8"): ("w8a8", 0),
    ("float8_e4m3fn", "float8_e4m3fn"): ("fp8", 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """By how much the perplexity rose over 16 bits: the range over the ways of rounding that were measured."""

    least: float
    most: float


@functools.cache
def measured() -> dict[str, Any]:
    path = Path(__file__).with_name("low_bit_accuracy.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def rise(products: str, weights: str) -> Rise | None:
    """
    >>> rise("bfloat16", "bfloat16"), rise("float4_e2m1fn", "float4_e2m1fn") is None
    (Rise(least=0.0, most=0.0), True)
    """
    halves = {"float16": "bfloat16"}
    how, group = MEASURED.get((halves.get(products, products), halves.get(weights, weights)), ("", 0))
    rows = [row for row in measured()["rows"] if row["how"] == how and row.get("group", 0) == group]
    rises = [row.get("rise", 0.0) for row in rows]
    return Rise(least=min(rises), most=max(rises)) if rises else None


def source() -> str:
    """The model whose perplexity was measured."""
    run = measured()
    return (
        f"a character model ({run['layers']} layers of {run['width']}, trained for {run['seconds']:g} s, "
        f"{run['gpu'].upper()}, {run['commit']}; benchmarks/low_bit_accuracy_h200.json)"
    )


def side_by_side(
    model: Model, machines: Sequence[Machine], steps: Sequence[Step], *, price_per_hour: float | None = None
) -> tuple[Prediction, ...]:
    """The first step of each kind but training, in every precision that a GPU has products of."""
    firsts = {step.mode: step for step in reversed(steps) if not step.trains}
    return tuple(
        estimate.predict(model, machine, replace(step, precision=each), price_per_hour=price_per_hour)
        for step in reversed(firsts.values())
        for machine in machines
        for each in (_precision(step.precision, *choice) for choice in CHOICES)
        if machine.limits.value(matmul_limit(each.products)) is not None
    )


def _precision(like: Precision, products: str, weights: str) -> Precision:
    """Activations and the cache stay as they were asked for."""
    wide = like.activations if find_dtype(like.activations).bits == 16 else "bfloat16"
    return replace(
        like,
        products=wide if products == "bfloat16" else products,
        weights=wide if weights == "bfloat16" else weights,
        activations=wide,
    )
