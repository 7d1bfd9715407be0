"""A small machine and a small run, for tests and for looking at a report without measuring anything."""

from __future__ import annotations

from sublight.results import Limit, Limits, Result, Run

_CURVE = [
    [blocks, warps, 4.3e12 * min(1.0, blocks * warps / 1056)] for warps in (4, 8) for blocks in (1, 8, 33, 66, 132, 264)
]


def limits() -> Limits:
    """Limits with every kind of line: normal, low, unjudged, unavailable; with a curve, with a shape."""
    return Limits(
        device="NVIDIA <H200>",  # hostile on purpose: names come from drivers and files, and must be escaped
        kind="cuda",
        uuid="GPU-1",
        driver="570.86",
        date="2026-11-15T02:00:00+0000",
        limits=(
            Limit(
                name="hbm_read",
                unit="B/s",
                value=4.30e12,
                spec=4.8e12,
                verdict="normal",
                detail={"curve": _CURVE, "knee": {"programs": 132, "warps": 8, "bytes_per_s": 4.3e12}},
            ),
            Limit(name="hbm_copy", unit="B/s", value=4.0e12, spec=4.8e12, verdict="low: throttled (power cap)"),
            Limit(
                name="matmul_bf16",
                unit="FLOP/s",
                value=770e12,
                spec=989e12,
                verdict="normal",
                detail={"shape": [8192, 8192, 8192]},
            ),
            Limit(name="vector_fp32", unit="FLOP/s", value=60e12, spec=67e12, verdict="normal"),
            Limit(name="launch_graph_node", unit="s", value=1.04e-6, verdict="unjudged: no figure to compare with"),
            Limit(name="peer_copy", unit="B/s", unavailable="one GPU: no peer link"),
        ),
    )


def row(provider: str, median_s: float | None, **rest: object) -> Result:
    """A row: softmax over 64 MiB of bf16, with the given fields replaced."""
    given: dict[str, object] = {
        "op": "softmax",
        "direction": "fwd",
        "shape": {"rows": 4096, "cols": 4096},
        "dtype": "bfloat16",
        "provider": provider,
        "ours": provider == "sublight",
        "median_s": median_s,
        "floor_s": 16.8e-6,
        "bound": "memory",
        "spread_s": 0.05e-6,
        "n": 20,
        "bytes": 67_108_864,
        "flops": 83_886_080.0,
        **rest,
    }
    return Result(**given)  # type: ignore[arg-type]


def run(*extra: Result) -> Run:
    """A run with our rows, two peers and one that is not installed; forward and backward."""
    backward = {"direction": "bwd", "floor_s": 25.2e-6, "bytes": 100_663_296, "flops": 67_108_864.0}
    rows = (
        row("sublight", 17.4e-6, kernel="_softmax_kernel", error=1.0),
        row("torch", 21.9e-6),
        row("liger", None, unavailable="liger is not installed"),
        row("sublight", 26.1e-6, **backward),
        row("torch", 25.6e-6, **backward),
        *extra,
    )
    return Run(
        gpu="NVIDIA <H200>",
        driver="570.86",
        torch="2.11.0",
        triton="3.6.0",
        commit="abc1234",
        date="2026-11-15T02:00:00+0000",
        limits=limits(),
        rows=rows,
    )
