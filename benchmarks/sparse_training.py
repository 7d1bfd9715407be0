"""A linear layer's training step with two of every four weights, made sparse as it runs, against the dense layer.

    python benchmarks/sparse_training.py --json sparse_training.json        about 25 s on an H200

Each row: forward, backward for the input and the weight, replayed from a graph. The zeros are checked first: products
in both directions against the same masked weight. The last figure is the pass that makes W and its transpose sparse.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sublight import timing
from sublight.fix.sparsify.training import SparseTrainingLinear, both_ways, why_not_both

SHAPES = ((8192, 8192, 8192), (8192, 14336, 4096), (8192, 4096, 14336), (4096, 4096, 4096), (16384, 8192, 8192))
BAR = 1.2
LEAST_TIME_S = 0.25


def step(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], Any]:
    leaves = (x, layer.weight)
    return lambda: torch.autograd.grad(layer(x), leaves, dy)  # type: ignore[arg-type]


def seconds(call: Callable[[], Any], device: str) -> float:
    return timing.measure(call, device=device, time_limit_s=LEAST_TIME_S, keep_outputs=False).median_s


def is_right(layer: SparseTrainingLinear, x: torch.Tensor, dy: torch.Tensor) -> bool:
    """Both products are those of one masked weight, as near as the dense product of it is in this data type."""
    eye = torch.eye(layer.in_features, device=x.device, dtype=x.dtype)
    masked = layer(eye).detach().T.contiguous()
    fours = (masked != 0).view(layer.out_features, -1, 4).sum(-1)
    kept = masked != 0
    dx, _ = torch.autograd.grad(layer(x), (x, layer.weight), dy)
    far = (dx - dy @ masked).float().norm() / dx.float().norm()
    return bool((fours <= 2).all() and torch.equal(masked[kept], layer.weight.detach()[kept]) and far < 1e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    shapes = SHAPES if options.device == "cuda" else ((64, 128, 64),)  # a CPU tries the script itself
    rows: list[dict[str, Any]] = []
    for m, n, k in shapes:
        dense = torch.nn.Linear(k, n, bias=False, device=options.device, dtype=dtype)
        layer = SparseTrainingLinear(dense.weight, None)
        x = torch.randn(m, k, device=options.device, dtype=dtype, requires_grad=True)
        dy = torch.randn(m, n, device=options.device, dtype=dtype)
        row: dict[str, Any] = {"m": m, "n": n, "k": k, "dtype": str(dtype).removeprefix("torch."), "why": layer.why}
        try:
            right = is_right(layer, x, dy)
            dense_s, sparse_s = (seconds(step(each, x, dy), options.device) for each in (dense, layer))
            making_s = seconds(lambda weight=dense.weight: both_ways(weight), options.device)  # type: ignore[misc]
            row |= {"right": right, "dense_s": dense_s, "sparse_s": sparse_s, "making_s": making_s}
            word = f"{dense_s / sparse_s:.2f} times ({'met' if dense_s / sparse_s >= BAR else 'not met'}: {BAR})"
            share = f"making it sparse {1e6 * making_s:.0f} µs, {making_s / sparse_s:.0%}"
            print(
                f"{m}x{n}x{k} {'right' if right else 'WRONG'}: dense {1e3 * dense_s:.3f} ms, sparse "
                f"{1e3 * sparse_s:.3f} ms, {word}; {share}; {why_not_both(dense.weight) or 'sparse tensor cores'}",
                flush=True,
            )
        except Exception as error:  # a PyTorch without the pass, or a shape that it does not take
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            print(f"{m}x{n}x{k} {row['error']}", flush=True)
        rows.append(row)
        if options.json:
            commit = subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
            )
            about = {"torch": torch.__version__, "commit": commit.stdout.strip(), "memory": "9/8 of the weight more"}
            options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
