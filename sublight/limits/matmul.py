"""Matrix product peak by data type: the best over a set of shapes, on random values, with the shape that gave it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from sublight import timing
from sublight.backend import private
from sublight.limits.probe import Context, Probe, rate
from sublight.results import Limit, Samples

if TYPE_CHECKING:
    import torch

KINDS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
# m, n, k; large enough to fill a GPU, and not only powers of two: some land badly on the number of multiprocessors
GPU_SHAPES = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 8192, 16384), (6144, 8448, 8192), (16384, 8192, 4096))
QUICK_GPU_SHAPES = ((8192, 8192, 8192), (6144, 8448, 8192))
CPU_SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048))
SLOW = {"fp32": 4, "fp64": 4}  # sizes are divided by this: at these low rates smaller problems fill a GPU


def measure(context: Context) -> Iterator[Limit]:
    for kind in KINDS:
        name, unit = f"matmul_{kind}", "OP/s" if kind == "int8" else "FLOP/s"
        reason = _missing(kind, context)
        if reason:
            yield Limit(name=name, unit=unit, unavailable=reason)
            continue
        try:
            shape, samples = _best(kind, context)
        except (RuntimeError, NotImplementedError) as error:
            yield Limit(name=name, unit=unit, unavailable=str(error).splitlines()[0])
            continue
        m, n, k = shape
        peaks = context.gpu.peak_flops if context.gpu else {}
        spec = max(peaks.get("fp64_tensor", 0), peaks.get("fp64", 0)) if kind == "fp64" else peaks.get(kind)
        detail = {"shape": list(shape), "way": "torch.mm" if kind not in ("fp8", "int8") else f"torch {kind}"}
        yield rate(name, unit, 2 * m * n * k, samples, spec=spec or None, detail=detail)


def _missing(kind: str, context: Context) -> str:
    if context.kind == "cpu":
        return {"tf32": "a GPU's format", "fp8": "no fp8 product on CPUs"}.get(kind, "")
    capability = (context.gpu.compute_capability if context.gpu else None) or (9, 0)
    if kind == "tf32" and capability < (8, 0):
        return "needs compute capability 8.0"
    if kind == "fp8" and capability < (8, 9):
        return "needs compute capability 8.9"
    return ""


def _best(kind: str, context: Context) -> tuple[tuple[int, int, int], Samples]:
    shapes: tuple[tuple[int, int, int], ...]
    if context.kind == "cpu":
        shapes = CPU_SHAPES[:1] if context.quick or kind not in ("fp32", "bf16") else CPU_SHAPES
    else:
        shapes = QUICK_GPU_SHAPES if context.quick else GPU_SHAPES
    timed = []
    for m, n, k in shapes:
        divisor = SLOW.get(kind, 1) if context.kind == "cuda" else 1
        shape = (m // divisor, n // divisor, k // divisor) if context.kind == "cuda" else (m, n, k)
        with _tf32(kind == "tf32"):
            call = _product(kind, shape, context.kind)
            timed.append((shape, timing.measure(call, device=context.kind, time_limit_s=context.time_limit_s / 2)))
    return min(timed, key=lambda pair: pair[1].median_s / (pair[0][0] * pair[0][1] * pair[0][2]))


def _product(kind: str, shape: tuple[int, int, int], device: str) -> Callable[[], torch.Tensor]:
    import torch

    m, n, k = shape
    if kind == "int8":
        a, b = (torch.randint(-127, 127, size, device=device, dtype=torch.int8) for size in ((m, k), (n, k)))
        return partial(private.int_mm, a, b.T)
    a, b = (torch.randn(size, device=device) for size in ((m, k), (n, k)))
    if kind == "fp8":
        one = torch.ones((), device=device)
        fp8 = torch.float8_e4m3fn
        return partial(
            private.scaled_mm, a.to(fp8), b.to(fp8).T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    names = {"fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}
    dtype = names.get(kind, torch.float32)
    return partial(torch.mm, a.to(dtype), b.to(dtype).T)


@contextlib.contextmanager
def _tf32(on: bool) -> Iterator[None]:
    """Turn TF32 products on or off inside the block; afterwards the setting is as before."""
    import torch

    was = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = was


MATMUL = Probe(
    name="matrix product", names=tuple(f"matmul_{kind}" for kind in KINDS), kinds=("cuda", "cpu"), measure=measure
)
