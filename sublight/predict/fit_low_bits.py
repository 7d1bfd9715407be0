"""Tables of products whose numbers have fewer than 16 bits.

fp8: published rows, in which finding the input's scale and rounding it is a part of the product. Weights of four bits:
a few shapes of this project's own kernels, so each is predicted by a fit to all others, and these are the errors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sublight.predict import analytic, expected, fit
from sublight.predict.analytic import Rates
from sublight.predict.fit import AXES, Row
from sublight.predict.machine import Machine
from sublight.predict.operation import product
from sublight.predict.step import Precision, Step

INT4 = "product int4"
START = {"unpack_s": 3.6e-11, "unpack_few": 0.5}
STAY = 0.02  # weight of a parameter's way from its start: a product's in 16 bits
GROUP = 128
L2_BYTES_PER_CLOCK = 32  # that an SM takes from the L2: on an H200 this is 8.4 TB/s, of which 7.9 are reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Types:
    """Of a product: what is multiplied, and what its weight is stored in."""

    products: str = "bfloat16"
    weights: str = "bfloat16"


def low_bit_row(gpu: Machine, types: Types, m: int, n: int, k: int, seconds: float, *, copies: int = 0) -> Row:
    """`copies` of the weight took turns, of which the L2 kept some; 0: none of it."""
    step = Step(mode="decode", batch=m, context=1, precision=Precision(products=types.products, weights=types.weights))
    op = product(step, "", m, n, k, 1)
    moved = op.cost.bytes + (expected.ROUNDED_BYTES * m * k if types.products == types.weights == expected.FP8 else 0)
    rates, cold = expected.rates_of(gpu, types.products), 1.0
    floor_s = max(op.cost.total_flops / gpu.peak(types.products), op.cost.bytes / (gpu.gpu.memory_bytes_per_s or 1.0))
    if copies:
        rates = with_l2(gpu, rates)
        around = 2 * m * (n + k)
        cold = analytic.cold_share(copies * max(op.cost.bytes - around, 0) + around, gpu.gpu.l2_bytes or 1)
    return Row(
        (m, n, k),
        seconds,
        lambda fitted: analytic.product_s(m, n, k, 1, moved, rates, fitted, cold),
        floor_s,
        floor_s,
    )


def with_l2(gpu: Machine, rates: Rates) -> Rates:
    return replace(rates, l2_bytes_per_s=L2_BYTES_PER_CLOCK * (gpu.gpu.sms or 1) * (gpu.gpu.boost_clock_hz or 0.0))


def fastest(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each shape that the kernels for four bits take, in the groups that predictions count with."""
    best: dict[tuple[int, ...], Mapping[str, Any]] = {}
    for row in rows:
        shape = (row["m"], row["n"], row["k"])
        if (row["bits"], row["group"]) != (4, GROUP) or row["m"] > expected.PACKED_ROWS:
            continue
        if shape not in best or row["time_s"] < best[shape]["time_s"]:
            best[shape] = row
    return list(best.values())


def four_bits(
    gpu: Machine, rows: Sequence[Mapping[str, Any]], start: Mapping[str, float], source: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The table, and the errors of each row by all others."""
    types, axes = Types(weights="int4"), AXES["product"]
    every = [low_bit_row(gpu, types, row["m"], row["n"], row["k"], row["time_s"]) for row in rows]
    alone, base = [], []
    for place, row in enumerate(every):
        others = every[:place] + every[place + 1 :]
        fitted = fit.fit(others, {**start, **START}, STAY)
        values = fit.grid(others, [other.model(fitted) for other in others], axes)
        base.append(row.model(fitted))
        alone += fit.corrected([row], base[-1:], axes, values)
    fitted = fit.fit(every, {**start, **START}, STAY)
    error = fit.errors(alone, every)
    made = {
        "gpu": gpu.key,
        "architecture": gpu.gpu.architecture or "",
        "kind": INT4,
        "axes": axes,
        "values": fit.grid(every, [row.model(fitted) for row in every], axes),
        "median_error": error[0],
        "p90_error": error[1],
        "rows": len(every),
        "source": source,
        "parameters": fitted,
    }
    check = {
        "what": f"{INT4}, {gpu.key}",
        "rows": len(every),
        "table": error,
        "analytic": fit.errors(base, every),
        "roofline": fit.errors([row.roofline_s for row in every], every),
        "viewer": fit.errors([row.viewer_s for row in every], every),
    }
    return made, check
