"""The limits of a GPU that is not at hand: rates that somebody reached on it, else the vendor's figures."""

from __future__ import annotations

from sublight.gpus import Gpu
from sublight.results import Limit, Limits

_MEMORY = ("hbm_read", "hbm_write", "hbm_copy", "hbm_triad")
_MATMULS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")
NAMES = (*_MEMORY, *(f"matmul_{dtype}" for dtype in _MATMULS), "vector_fp32", "h2d_pinned", "d2h_pinned",
         "launch_graph_node")  # fmt: skip
NODE_S = 1e-6  # a kernel in a CUDA graph, where it was not measured: launch and drain, on GPUs of these years


def matmul_reached(gpu: Gpu, dtype: str) -> float | None:
    """What products were seen to reach. fp16's run as bf16's do: where only those were measured, at the same share of
    the vendor's figure."""
    found = gpu.reached.get(f"matmul_{dtype}")
    if found is None and dtype == "fp16" and (wide := gpu.reached.get("matmul_bf16")):
        peak, its_peak = gpu.peak_flops.get("fp16"), gpu.peak_flops.get("bf16")
        return wide * (peak / its_peak) if peak and its_peak else None
    return found


def of_gpu(gpu: Gpu) -> tuple[Limits, str]:
    """What is known of a GPU: rates that somebody reached, else the vendor's."""
    limits = []
    for name in _MEMORY:
        value = gpu.reached.get(name, gpu.reached.get("hbm_copy", gpu.memory_bytes_per_s))
        limits.append(Limit(name=name, unit="B/s", value=value, spec=gpu.memory_bytes_per_s))
    for dtype in _MATMULS:
        peak = gpu.peak_flops.get(dtype)
        value = matmul_reached(gpu, dtype) or peak
        limits.append(Limit(name=f"matmul_{dtype}", unit="FLOP/s", value=value, spec=peak))
    vector = gpu.peak_flops.get("fp32")
    limits.append(Limit(name="vector_fp32", unit="FLOP/s", value=gpu.reached.get("vector_fp32", vector), spec=vector))
    for name in ("h2d_pinned", "d2h_pinned"):
        limits.append(Limit(name=name, unit="B/s", value=gpu.reached.get(name, gpu.pcie_bytes_per_s)))
    limits.append(Limit(name="peer_copy", unit="B/s", value=gpu.nvlink_bytes_per_s, spec=gpu.nvlink_bytes_per_s))
    limits.append(Limit(name="launch_graph_node", unit="s", value=gpu.reached.get("launch_graph_node", NODE_S)))
    reached = len(gpu.reached)
    source = f"known of the {gpu.name}: " + (
        f"{reached} reached rates, else vendor figures" if reached else "vendor figures"
    )
    named = gpu.name if gpu.vendor in gpu.name else f"{gpu.vendor} {gpu.name}"
    known = tuple(limit for limit in limits if limit.value)
    return Limits(device=named, kind="cuda", source=source, limits=known), source
