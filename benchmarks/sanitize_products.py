"""The products' kernels under compute-sanitizer, at odd sizes: does any read or write outside of its tensors?

    python benchmarks/sanitize_products.py [--tool memcheck|racecheck|initcheck]     about a minute on an H200

It starts itself under compute-sanitizer, which slows kernels down a hundredfold: so sizes are small, and each kernel
runs once.
Exit status 0: clean; 1: something was found, printed as compute-sanitizer says it; 2: no compute-sanitizer or no GPU.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

SIZES = ((1, 65, 700), (17, 129, 63), (130, 257, 136))
FOUND = 9  # what compute-sanitizer is told to exit with


def launches() -> Iterator[tuple[str, Any]]:
    """A name and a call for each provider of each product, at each size that it takes."""
    import torch

    from sublight.backend.device import facts
    from sublight.ops.matmul import tiles
    from sublight.ops.matmul.grouped_matmul import GROUPED_MATMUL
    from sublight.ops.matmul.low_bit_matmul import LOW_BIT_MATMUL
    from sublight.ops.matmul.matmul import MATMUL
    from sublight.ops.matmul.scaled_matmul import SCALED_MATMUL
    from sublight.ops.moe.moe_experts import MOE_EXPERTS
    from sublight.ops.sparse.sparsify_24 import SPARSIFY_24

    for m, n, k in SIZES:
        shape = {"m": m, "n": n, "k": k}
        made = {"device": "cuda", "dtype": torch.bfloat16}
        more = (torch.randn(n, **made), torch.randn(m, n, **made), "gelu")
        yield from _of(MATMUL, shape, "bfloat16", *more)
        for block in (0, 128):
            yield from _of(SCALED_MATMUL, {**shape, "block": block}, "float8_e4m3fn")
    split = tiles.Split(tile=next(iter(tiles.PERSISTENT)), pieces=3)

    def in_pieces(*args: Any) -> None:
        token = tiles.TRIED_SPLIT.set(split)
        try:
            MATMUL.providers["split_k"].launch(*args)
        finally:
            tiles.TRIED_SPLIT.reset(token)

    if facts(torch.empty(0, device="cuda")).capability == 90:
        inputs = MATMUL.inputs({"m": 130, "n": 300, "k": 1000}, "bfloat16", "cuda", 0)
        yield "matmul split_k in pieces", lambda: in_pieces(*inputs)
    for op in (LOW_BIT_MATMUL, GROUPED_MATMUL, MOE_EXPERTS, SPARSIFY_24):
        for shape in op.test_shapes:
            yield from _of(op.at(shape), shape, "bfloat16")


def _of(op: Any, shape: Any, dtype: str, *more: Any) -> Iterator[tuple[str, Any]]:
    inputs = op.inputs(shape, dtype, "cuda", 0)
    for name, provider in op.providers.items():
        if not provider.why_not(*inputs):
            yield f"{op.name} {name} {shape}", lambda provider=provider: provider.launch(*inputs, *more)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "racecheck", "initcheck"))
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        import torch

        for name, call in launches():
            print(name, flush=True)
            call()
            torch.cuda.synchronize()
        return 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        print("no compute-sanitizer here: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("sanitize_products.py launches kernels on a GPU, and torch finds none here", file=sys.stderr)
        return 2
    options = [f"--tool={given.tool}", f"--error-exitcode={FOUND}", "--print-limit=20"]
    done = subprocess.run([sanitizer, *options, sys.executable, __file__, "--inside"], check=False)
    return 0 if done.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
