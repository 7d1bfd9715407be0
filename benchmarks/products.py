"""Products on this GPU: which tile each shape wants, how ours compare with cuBLAS, and rows for `predict`.

    python benchmarks/products.py choice low-bit --json benchmarks/products_h200.json     what the docs show
    python benchmarks/products.py tiles skinny rows --json products.json

Each part prints a table as it goes, and the file is written after each, so that a run that is cut short keeps what it
has. `choice` holds what the plan decides against what is faster; `tiles` tries every tile on the shapes of Llama's
layers; `rows` times log-spaced shapes, of which every fifth is marked as held back.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from sublight import bench, timing
from sublight.ops.matmul import tiles
from sublight.ops.matmul.low_bit_matmul import LOW_BIT_MATMUL
from sublight.ops.matmul.matmul import MATMUL
from sublight.ops.matmul.tiles import Tile

LAYERS = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (10240, 8192),
    (8192, 8192),
    (57344, 8192),
    (8192, 28672),
)
ODD = ((4096, 100_000, 700), (4096, 400_000, 700), (4096, 4096, 4096), (8192, 8192, 8192))
DECIDED = (
    *((m, n, k) for n, k in ((1024, 1024), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096))
      for m in (1, 4, 16, 64)),
    *((4096, 100_000, 700), (4096, 400_000, 700), (4096, 4096, 700), (512, 4096, 1001), (128, 8192, 4095)),
    *((1024, 1023, 1024), (8192, 8190, 512), (2048, 2048, 2047), (256, 50257, 768), (8192, 50257, 768)),
    *((m, n, k) for m in (256, 1024, 4096, 8192)
      for n, k in ((6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192))),
)  # fmt: skip
CACHE_BYTES = 50e6
CANDIDATES = [
    Tile(bm=bm, bn=bn, bk=bk, warps=warps, stages=stages, group=group, is_flat=is_flat)
    for (bm, bn, bk, warps, stages), group, is_flat in itertools.product(
        (
            (128, 256, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 4), (256, 128, 64, 8, 3),
            (128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (128, 128, 128, 8, 3), (64, 256, 64, 4, 4),
            (128, 192, 64, 8, 4), (192, 128, 64, 8, 4), (64, 128, 64, 4, 6), (64, 128, 128, 4, 4), (64, 64, 128, 4, 5),
        ),
        (8, 16), (True, False),
    )
    if (bm & (bm - 1)) == 0 and (bn & (bn - 1)) == 0  # Triton's blocks are powers of two
]  # fmt: skip
Row = dict[str, Any]


def sets_of(m: int, n: int, k: int, dtype: str = "bfloat16") -> list[tuple[Any, ...]]:
    """Inputs enough that none is still in the cache when its turn comes again."""
    size = 2 * (m * k + n * k)
    count = max(1, min(64, math.ceil(2 * CACHE_BYTES / size)))
    return [MATMUL.inputs({"m": m, "n": n, "k": k}, dtype, "cuda", seed) for seed in range(count)]


def seconds(call: Callable[..., Any], inputs: list[tuple[Any, ...]], time_limit_s: float = 0.05) -> float | None:
    """None where the GPU has not what the tile asks for."""
    try:
        thunks = [lambda args=args: call(*args) for args in inputs]
        return timing.measure(thunks, time_limit_s=time_limit_s, keep_outputs=False).median_s
    except Exception as error:  # Triton's errors for too much shared memory have no common parent
        print(f"  {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        return None


def rate(m: int, n: int, k: int, time_s: float | None) -> str:
    return "    –" if not time_s else f"{2e-12 * m * n * k / time_s:5.0f}"


def every_tile() -> Iterator[Row]:
    """Each shape by each tile, against cuBLAS."""
    print(f"{'m':>6} {'n':>7} {'k':>6} {'cuBLAS':>7} {'rule':>6} {'best':>6}  best tile")
    shapes = [*ODD, *((m, n, k) for m in (256, 512, 1024, 2048, 4096, 8192) for n, k in LAYERS)]
    for m, n, k in shapes:
        inputs = sets_of(m, n, k)
        theirs, rule = seconds(torch.matmul, inputs), seconds(MATMUL.launch, inputs)
        found = []
        for tile in CANDIDATES:
            if tile.count(m, n) < 40 and tile.bm * tile.bn > 64 * 128:
                continue  # most multiprocessors would have none
            token = tiles.TRIED.set(tile)
            try:
                time_s = seconds(MATMUL.launch, inputs, 0.02)
            finally:
                tiles.TRIED.reset(token)
            if time_s:
                found.append((time_s, tile))
                yield {"m": m, "n": n, "k": k, "time_s": time_s, **asdict(tile)}
        yield {"m": m, "n": n, "k": k, "time_s": theirs, "provider": "torch"}
        yield {"m": m, "n": n, "k": k, "time_s": rule, "provider": "persistent"}
        best_s, best = min(found, key=lambda one: one[0])
        print(
            f"{m:>6} {n:>7} {k:>6} {rate(m, n, k, theirs):>7} {rate(m, n, k, rule):>6} {rate(m, n, k, best_s):>6}  "
            f"{best.bm}x{best.bn}x{best.bk} warps {best.warps} stages {best.stages} group {best.group} "
            f"{'flat' if best.is_flat else 'nested'}",
            flush=True,
        )


def choice() -> Iterator[Row]:
    """Ours against cuBLAS, before and after each other, and who gets the product."""
    print(f"{'m':>6} {'n':>7} {'k':>6} {'cuBLAS µs':>10} {'ours µs':>10} {'ratio':>6}  the plan")
    for m, n, k in DECIDED:
        inputs = sets_of(m, n, k)[:16]
        launch = MATMUL.providers["skinny" if m <= 64 else "persistent"].launch
        times = [seconds(call, inputs, 0.025) for call in (torch.matmul, launch, torch.matmul)]
        ours, theirs = times[1], min((time_s for time_s in times[::2] if time_s), default=None)
        reason = MATMUL.plan(*inputs[0]).reason
        yield {"m": m, "n": n, "k": k, "torch_s": theirs, "ours_s": ours, "plan": reason}
        if ours and theirs:
            sizes = f"{m:>6} {n:>7} {k:>6} {1e6 * theirs:>10.1f} {1e6 * ours:>10.1f}"
            print(f"{sizes} {theirs / ours:>6.2f}  {reason}", flush=True)


def few_rows() -> Iterator[Row]:
    """Of 1 to 64 rows: bytes of the weight a second."""
    print(f"{'m':>6} {'n':>7} {'k':>6} {'cuBLAS':>8} {'ours':>8} TB/s")
    for (n, k), m in itertools.product(((4096, 4096), (14336, 4096), (4096, 14336)), (1, 2, 4, 8, 16, 32, 64)):
        inputs = sets_of(m, n, k)
        times = {
            "torch": seconds(torch.matmul, inputs),
            "skinny": seconds(MATMUL.providers["skinny"].launch, inputs),
            "persistent": seconds(MATMUL.providers["persistent"].launch, inputs),
        }
        speeds = [2e-12 * n * k / time_s if time_s else math.nan for time_s in times.values()]
        print(f"{m:>6} {n:>7} {k:>6} {speeds[0]:>8.2f} {speeds[1]:>8.2f} {speeds[2]:>8.2f}", flush=True)
        yield from ({"m": m, "n": n, "k": k, "provider": name, "time_s": time_s} for name, time_s in times.items())


def low_bit() -> Iterator[Row]:
    """Weights of four bits, against cuBLAS on whole ones."""
    print(f"{'m':>6} {'n':>7} {'k':>6} {'cuBLAS µs':>10} {'4 bits µs':>10} {'TB/s packed':>12}")
    for (n, k), m in itertools.product(((4096, 4096), (14336, 4096), (4096, 14336)), (1, 4, 16, 64, 128, 2048)):
        shape = {"m": m, "n": n, "k": k, "bits": 4, "group": 128}
        count = max(1, math.ceil(2 * CACHE_BYTES / (n * k / 2)))
        packed = [LOW_BIT_MATMUL.inputs(shape, "bfloat16", "cuda", seed) for seed in range(count)]
        for name, provider in LOW_BIT_MATMUL.providers.items():
            if provider.why_not(*packed[0]):
                continue
            time_s, theirs = seconds(provider.launch, packed), seconds(torch.matmul, sets_of(m, n, k))
            yield {**shape, "provider": name, "time_s": time_s, "torch_s": theirs}
            if time_s and theirs:
                speed = n * k / 2 / time_s / 1e12
                times = f"{1e6 * theirs:>10.1f} {1e6 * time_s:>10.1f}"
                print(f"{m:>6} {n:>7} {k:>6} {times} {speed:>12.2f} {name}", flush=True)


def log_spaced(count: int = 330) -> Iterator[Row]:
    """Shapes drawn evenly in the logarithm of each side, of at most 6 TFLOP."""
    generator = torch.Generator().manual_seed(0)
    made = 0
    while made < count:
        m, n, k = (8 * round(2 ** (11 * float(x))) for x in torch.rand(3, generator=generator))
        if 2 * m * n * k > 6e12 or m * n > 2**31:
            continue
        inputs = sets_of(m, n, k)
        yield {
            "m": m, "n": n, "k": k, "dtype": "bfloat16", "is_held_back": made % 5 == 4,
            "torch_s": seconds(torch.matmul, inputs, 0.02), "ours_s": seconds(MATMUL.launch, inputs, 0.02),
        }  # fmt: skip
        made += 1


PARTS = {"choice": choice, "tiles": every_tile, "skinny": few_rows, "low-bit": low_bit, "rows": log_spaced}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--commit", default="", help="what was measured, where there is no git to ask")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("products.py times a GPU, and torch finds none here")
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": options.commit or bench.commit(),
    }
    for part in options.parts:
        rows: list[Row] = []
        found[part] = rows
        try:
            for row in PARTS[part]():
                rows.append(row)
        finally:
            options.json.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
