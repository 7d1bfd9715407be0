"""Products on this GPU: which tile each shape wants, how ours compare with cuBLAS, and rows for `predict`.

    python benchmarks/products.py choice low-bit --json benchmarks/products_h200.json     what the docs show
    python benchmarks/products.py tiles skinny rows --json products.json
    python benchmarks/products.py splits epilogue fp8 --json splits.json     what tiles.py and choice.py go by
    python benchmarks/products.py rows --jobs 14 --limit 55 --json rows.json     log-spaced shapes (`product_rows.py`)

Each part prints a table as it goes, and the file is written after each, so that a run that is cut short keeps what it
has. `choice` holds what the plan decides against what is faster; `tiles` tries every tile on the shapes of Llama's
layers, `splits` every way to share out what whole rounds leave over; `epilogue` holds a product with what follows it
against cuBLAS and a kernel behind it.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import product_rows
import torch
import triton

import sublight
from sublight import bench, correct, timing
from sublight.backend.device import Facts
from sublight.ops.matmul import tiles
from sublight.ops.matmul.low_bit_matmul import LOW_BIT_MATMUL
from sublight.ops.matmul.matmul import MATMUL
from sublight.ops.matmul.scaled_matmul import SCALED_MATMUL
from sublight.ops.matmul.tiles import Split, Tile, split_of

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
        rows = []
        for tile in CANDIDATES:
            if tile.count(m, n) < 40 and tile.bm * tile.bn > 64 * 128:
                continue  # most multiprocessors would have none
            token = tiles.TRIED.set(tile)
            try:
                time_s = seconds(MATMUL.launch, inputs, 0.02)
            finally:
                tiles.TRIED.reset(token)
            if time_s:
                rows.append((time_s, tile))
                yield {"m": m, "n": n, "k": k, "time_s": time_s, **asdict(tile)}
        yield {"m": m, "n": n, "k": k, "time_s": theirs, "provider": "torch"}
        yield {"m": m, "n": n, "k": k, "time_s": rule, "provider": "persistent"}
        best_s, best = min(rows, key=lambda one: one[0])
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


def every_split() -> Iterator[Row]:
    """Each way to share out the tiles of Llama's layers at 256 to 1024 rows, against cuBLAS."""
    gpu = Facts()
    print(f"{'m':>6} {'n':>7} {'k':>6} {'cuBLAS µs':>10} {'rule':>6} {'best':>6}  ratios; the best's rounds, pieces")
    for m, (n, k) in itertools.product((256, 512, 1024), LAYERS):
        inputs = sets_of(m, n, k)[:16]
        before = seconds(torch.matmul, inputs, 0.03)
        rule = split_of(m, n, k, gpu)
        times: dict[Split, float | None] = {}
        for split, stages in itertools.product(tiles.splits(m, n, k, gpu), (4,)):
            tried = replace(split, tile=replace(split.tile, stages=stages)) if split.pieces > 1 else split
            token = tiles.TRIED_SPLIT.set(tried)
            try:
                if tried not in times:
                    times[tried] = seconds(MATMUL.providers["split_k"].launch, inputs, 0.02)
                    if split.pieces > 1 and (m, n) in ((256, 6144), (256, 28672)):
                        assert_right(inputs[0])
            finally:
                tiles.TRIED_SPLIT.reset(token)
        theirs = min(filter(None, (before, seconds(torch.matmul, inputs, 0.03))))
        for split, time_s in times.items():
            yield {"m": m, "n": n, "k": k, "time_s": time_s, "torch_s": theirs, "rounds": split.rounds,
                   "pieces": split.pieces, **asdict(split.tile), "is_rule": split == rule}  # fmt: skip
        best = min((split for split, time_s in times.items() if time_s), key=lambda split: times[split] or math.inf)
        print(
            f"{m:>6} {n:>7} {k:>6} {1e6 * theirs:>10.1f} {theirs / (times[rule] or math.inf):>6.2f} "
            f"{theirs / (times[best] or math.inf):>6.2f}  {best.rounds} {best.pieces} "
            f"{best.tile.bm}x{best.tile.bn} stages {best.tile.stages}",
            flush=True,
        )


def assert_right(inputs: tuple[Any, ...]) -> None:
    error = correct.settled(
        lambda seed: correct.forward_errors(MATMUL.providers["split_k"].launch, MATMUL.reference, inputs)
    )
    assert error.ok, error


def with_epilogue() -> Iterator[Row]:
    """A product and what follows it: one kernel of ours against cuBLAS and a pointwise kernel, the best of them."""
    print(
        f"{'m':>6} {'n':>7} {'k':>6} {'what':>14} {'ours µs':>9} {'cuBLAS + one':>13} {'as written':>11} {'ratio':>6}"
    )
    for m, (n, k) in itertools.product((512, 1024, 4096, 8192), ((4096, 4096), (14336, 4096), (4096, 14336))):
        inputs = sets_of(m, n, k)[:8]
        bias, residual = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((n,), (m, n)))
        ways: dict[str, tuple[tuple[Any, ...], list[Callable[..., Any]]]] = {
            "bias gelu": ((bias, None, "gelu"), [lambda a, b, h=bias: sublight.bias_gelu(a @ b, h)]),
            "bias gelu_tanh": (
                (bias, None, "gelu_tanh"),
                [lambda a, b, h=bias: torch._addmm_activation(h, a, b, use_gelu=True)],
            ),
            "silu": ((None, None, "silu"), [lambda a, b: torch.nn.functional.silu(a @ b)]),
            "bias residual": ((bias, residual, "none"), [lambda a, b, h=bias, r=residual: torch.addmm(h, a, b) + r]),
            "residual": ((None, residual, "none"), [lambda a, b, r=residual: torch.addmm(r, a, b)]),
        }
        for name, (more, peers) in ways.items():
            ours = seconds(lambda a, b, more=more: MATMUL.providers["split_k"].launch(a, b, *more), inputs, 0.03)
            theirs = min(filter(None, (seconds(peer, inputs, 0.03) for peer in peers)), default=None)
            written = seconds(lambda a, b, more=more: MATMUL.reference(a, b, *more), inputs, 0.02)
            yield {"m": m, "n": n, "k": k, "what": name, "ours_s": ours, "torch_s": theirs, "written_s": written}
            if ours and theirs and written:
                times = f"{1e6 * ours:>9.1f} {1e6 * theirs:>13.1f} {1e6 * written:>11.1f}"
                print(f"{m:>6} {n:>7} {k:>6} {name:>14} {times} {theirs / ours:>6.2f}", flush=True)


CODES_SHAPES = (
    *((8192, 8192, 8192), (4096, 4096, 4096), (4096, 14336, 4096), (8192, 28672, 4096), (4096, 4096, 14336)),
    *((m, n, k) for m in (256, 512, 1024, 2048) for n, k in ((4096, 4096), (14336, 4096), (4096, 14336), (6144, 4096))),
)
CODES_TILES = (
    Tile(bm=128, bn=128, bk=128, warps=8, stages=3),
    Tile(bm=128, bn=128, bk=128, warps=8, stages=4),
    Tile(bm=64, bn=128, bk=128, warps=4, stages=3),
    Tile(bm=64, bn=256, bk=128, warps=8, stages=3),
)


def codes() -> Iterator[Row]:
    """fp8: our kernels and PyTorch's, with sums of the tensor cores ("fast") and in fp32, scales of rows and blocks."""
    row_sums = {"torch": False, "torch fast": True}
    print(f"{'m':>6} {'n':>7} {'k':>6}  TFLOP/s of each")
    for m, n, k in CODES_SHAPES:
        count = max(1, min(16, math.ceil(2 * CACHE_BYTES / (m * k + n * k))))
        shape = {"m": m, "n": n, "k": k}
        by_row = [SCALED_MATMUL.inputs({**shape, "block": 0}, "float8_e4m3fn", "cuda", seed) for seed in range(count)]
        by_block = [
            SCALED_MATMUL.inputs({**shape, "block": 128}, "float8_e4m3fn", "cuda", seed) for seed in range(count)
        ]
        square = [(a, b, sa, sb[:, ::128].contiguous()) for a, b, sa, sb in by_block]
        if (m, n, k) == CODES_SHAPES[1]:
            for name, inputs in (
                ("promoted", by_row),
                ("persistent", by_row),
                ("promoted", by_block),
                ("promoted", square),
            ):
                truth = functools.partial(SCALED_MATMUL.reference, fast=name == "persistent")
                errors = correct.forward_errors(SCALED_MATMUL.providers[name].launch, truth, inputs[0])
                print(
                    f"  {name} {tuple(inputs[0][3].shape)}: {'right' if errors[0].ok else f'WRONG {errors[0]}'}",
                    flush=True,
                )
        times: dict[str, float | None] = {
            name: seconds(functools.partial(SCALED_MATMUL.reference, fast=fast), by_row, 0.02)
            for name, fast in row_sums.items()
        }
        times["ours fast"] = seconds(SCALED_MATMUL.providers["persistent"].launch, by_row, 0.02)
        for tile in CODES_TILES if m in (8192, 512) else CODES_TILES[:2]:
            token = tiles.TRIED.set(tile)
            try:
                name = f"{tile.bm}x{tile.bn} {tile.warps} warps {tile.stages} stages"
                launch = SCALED_MATMUL.providers["promoted"].launch
                times[f"rows {name}"] = seconds(launch, by_row, 0.02)
                if tile.bn == 128:
                    times[f"blocks {name}"] = seconds(launch, square, 0.02)
                    times[f"columns {name}"] = seconds(launch, by_block, 0.02)
            finally:
                tiles.TRIED.reset(token)
        yield {**shape, "seconds": times}
        words = ", ".join(f"{name} {rate(m, n, k, time_s).strip()}" for name, time_s in times.items())
        print(f"{m:>6} {n:>7} {k:>6}  {words}", flush=True)


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


PARTS = {
    "choice": choice,
    "tiles": every_tile,
    "splits": every_split,
    "epilogue": with_epilogue,
    "fp8": codes,
    "skinny": few_rows,
    "low-bit": low_bit,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "rows"])
    parser.add_argument("--json", type=Path, required=True, help="where the rows go")
    parser.add_argument("--commit", default="", help="what was measured, where there is no git to ask")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="S", help="begin no row after S seconds")
    parser.add_argument("--jobs", type=int, default=0, help="for `rows`: compile kernels in so many processes first")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # of --jobs: this process compiles
    options = parser.parse_args()
    begin = time.monotonic()
    if not torch.cuda.is_available():
        sys.exit("products.py times a GPU, and torch finds none here")
    if options.part is not None:
        return product_rows.compile_part(options.part, options.jobs)
    timed_parts = {**PARTS, "rows": functools.partial(product_rows.rows, options.jobs)}
    document: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": options.commit or bench.commit(),
    }
    for part in options.parts:
        rows: list[Row] = []
        document[part] = rows
        try:
            for row in timed_parts[part]():
                rows.append(row)
                if time.monotonic() - begin > options.limit:
                    print(f"{part}: {len(rows)} rows in {options.limit:.0f} s", file=sys.stderr)
                    break
        finally:
            options.json.write_text(json.dumps(document), encoding="utf-8")


if __name__ == "__main__":
    main()
