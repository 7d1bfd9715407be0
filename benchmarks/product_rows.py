"""Log-spaced products on this GPU, cuBLAS's and ours, in bf16 and fp8, for `predict`: 330 shapes in a minute.

    python benchmarks/products.py rows --jobs 14 --limit 55 --json rows.json

`--jobs` processes launch every product once first, which leaves their kernels in Triton's cache. A product is timed by
a CUDA graph of calls on inputs that the cache no longer holds, replayed three times; every fifth shape is held back.
"""

from __future__ import annotations

import functools
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sublight.ops.matmul.matmul import MATMUL
from sublight.ops.matmul.scaled_matmul import SCALED_MATMUL
from sublight.ops.matmul.skinny import MOST_ROWS

COUNT = 330
MOST_FLOPS = 6e12
CACHE_BYTES = 100e6  # inputs take turns over so many bytes, so that none is still in the cache
GRAPH_S = 1e-3  # a graph holds calls for about so long, at the rates below
COMPILE_S = 25.0  # that a process of --jobs may take
Row = dict[str, Any]
Calls = dict[str, Callable[..., Any]]


def drawn(count: int = COUNT) -> list[tuple[int, int, int]]:
    """Shapes, even in the logarithm of each side.

    >>> shapes = drawn(50)
    >>> len(shapes), all(side % 8 == 0 for shape in shapes for side in shape), shapes == drawn(50)
    (50, True, True)
    """
    generator, shapes = torch.Generator().manual_seed(0), []
    while len(shapes) < count:
        m, n, k = (8 * round(2 ** (11 * float(x))) for x in torch.rand(3, generator=generator))
        if 2 * m * n * k <= MOST_FLOPS and m * n <= 2**31:
            shapes.append((m, n, k))
    return shapes


def cases(shape: tuple[int, int, int]) -> Iterator[tuple[Row, Calls, list[tuple[Any, ...]]]]:
    """What is timed at a shape: its row, the calls, the inputs that they take in turn."""
    m, n, k = shape
    sets = [MATMUL.inputs({"m": m, "n": n, "k": k}, "bfloat16", "cuda", seed) for seed in range(_sets(2 * (m + n) * k))]
    ours = MATMUL.providers["skinny" if m <= MOST_ROWS else "persistent"].launch
    yield {"m": m, "n": n, "k": k, "dtype": "bfloat16"}, {"torch_s": torch.matmul, "ours_s": ours}, sets
    n, k = 16 * math.ceil(n / 16), 16 * math.ceil(k / 16)  # what PyTorch's product of codes takes
    row = {"m": m, "n": n, "k": k}
    sets = [SCALED_MATMUL.inputs({**row, "block": 0}, "float8_e4m3fn", "cuda", x) for x in range(_sets((m + n) * k))]
    calls: Calls = {
        "torch_s": SCALED_MATMUL.reference,
        "ours_s": SCALED_MATMUL.providers["promoted"].launch,
        "torch_fast_s": functools.partial(SCALED_MATMUL.reference, fast=True),  # the tensor cores' own sums
        "ours_fast_s": SCALED_MATMUL.providers["persistent"].launch,
    }
    yield {**row, "dtype": "float8_e4m3fn"}, calls, sets


def _sets(input_bytes: int) -> int:
    return max(1, min(16, math.ceil(CACHE_BYTES / input_bytes)))


def rows(jobs: int = 0) -> Iterator[Row]:
    if jobs:
        compile_first(jobs)
    for number, shape in enumerate(drawn()):
        for row, calls, sets in cases(shape):
            times = {name: seconds(call, sets, math.prod(shape)) for name, call in calls.items()}
            yield {**row, "is_held_back": number % 5 == 4, **times}


def seconds(call: Callable[..., Any], sets: list[tuple[Any, ...]], products: int) -> float | None:
    """The median of three replays; None where the GPU has not what a kernel asks for."""
    expected_s = max(2 * products / 7e14, sum(x.nbytes for x in sets[0][:2]) / 4e12, 3e-6)
    count = max(len(sets), min(200, int(GRAPH_S / expected_s)))
    try:
        call(*sets[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for number in range(count):
                call(*sets[number % len(sets)])
        graph.replay()
        times = []
        for _ in range(3):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3 / count)
        return statistics.median(times)
    except Exception as error:  # Triton has several unrelated exceptions for too much shared memory
        print(f"  {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
        return None


def compile_first(jobs: int) -> None:
    """Every product once in one of several processes."""
    begin = time.monotonic()
    command = [sys.executable, *sys.argv, "--part"]
    for process in [subprocess.Popen([*command, str(part)], stdout=subprocess.DEVNULL) for part in range(jobs)]:
        process.wait()
    print(f"kernels compiled in {time.monotonic() - begin:.0f} s", flush=True)


def compile_part(part: int, jobs: int) -> None:
    """Products that one of these processes launches."""
    begin = time.monotonic()
    for shape in drawn()[part::jobs]:
        for _, calls, sets in cases(shape):
            for call in calls.values():
                if time.monotonic() - begin < COMPILE_S:
                    seconds(call, sets[:1], math.prod(shape))
