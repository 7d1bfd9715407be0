"""What the arithmetic units reach without tensor cores: chains of fused multiply-adds that touch no memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from sublight import timing
from sublight.limits.probe import Context, Probe, rate
from sublight.results import Limit

KINDS = (("vector_fp32", "float32", "fp32"), ("vector_fp64", "float64", "fp64"), ("vector_int32", "int32", "int32"))


def measure(context: Context) -> Iterator[Limit]:
    import torch

    from sublight.limits.kernels.vector import CHAINS, THREADS, UNROLL, multiply_add

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    programs = 16 * sms
    for name, dtype, key in KINDS:
        size = programs * THREADS * CHAINS
        if dtype == "int32":
            x = torch.randint(-(2**31), 2**31 - 1, (size,), device="cuda", dtype=torch.int32)
        else:  # |x| < 1/2, so that x + x² + x³ + … stays finite
            x = (torch.rand(size, device="cuda") - 0.5).to(getattr(torch, dtype))
        rounds = 200 if dtype != "float64" else 60
        samples = timing.measure(partial(multiply_add, x, rounds, programs), time_limit_s=context.time_limit_s)
        done = 2 * size * rounds * UNROLL  # a multiply and an add
        spec = context.gpu.peak_flops.get(key) if context.gpu else None
        yield rate(name, "OP/s" if key == "int32" else "FLOP/s", done, samples, spec=spec)


VECTOR = Probe(name="vector units", names=tuple(name for name, _, _ in KINDS), kinds=("cuda",), measure=measure)
