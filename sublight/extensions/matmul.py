"""A matrix product: how often each operand is read from each memory, and by which instruction it is multiplied."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from sublight.cost import Cost, Shape
from sublight.cost import find as find_cost
from sublight.extensions.ladder import Ladder, Rung, Runner, ceil_div

if TYPE_CHECKING:
    import torch

BLOCK = 128
TOTALS_SHARED_BYTES = 4 * BLOCK * BLOCK  # where a block of `registers` and `vectorised` adds up its parts
MMA_ROWS, MMA_COLS, MMA_DEPTH, MMA_STAGES = 128, 256, 64, 3
MMA_SHARED_BYTES = 2 * MMA_STAGES * MMA_DEPTH * (MMA_ROWS + MMA_COLS)
WGMMA_STAGES = 4
WGMMA_SHARED_BYTES = 2 * WGMMA_STAGES * MMA_DEPTH * (MMA_ROWS + MMA_COLS) + 1024  # tiles begin at a multiple of 1024


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def _out(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    (m, k), n = a.shape, b.shape[1]
    return a.new_empty(m, n), m, n, k


def _naive(runner: Runner, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c, m, n, k = _out(a, b)
    runner.launch("matmul_naive", (ceil_div(n, 32), ceil_div(m, 8)), (32, 8), a, b, c, m, n, k)
    return c


def _tiled(runner: Runner, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c, m, n, k = _out(a, b)
    runner.launch("matmul_tiled", (ceil_div(n, 32), ceil_div(m, 32)), (32, 32), a, b, c, m, n, k)
    return c


def _blocks(runner: Runner, a: torch.Tensor, b: torch.Tensor, *, kernel: str, shared_bytes: int) -> torch.Tensor:
    c, m, n, k = _out(a, b)
    runner.launch(kernel, (n // BLOCK, m // BLOCK), (256,), a, b, c, m, n, k, shared_bytes=shared_bytes)
    return c


def _mma(runner: Runner, a: torch.Tensor, b: torch.Tensor, *, kernel: str, shared_bytes: int) -> torch.Tensor:
    c, m, n, k = _out(a, b)
    blocks = (m // MMA_ROWS) * (n // MMA_COLS)
    runner.launch(kernel, (blocks,), (256,), a, b, c, m, n, k, shared_bytes=shared_bytes)
    return c


def _not_factors(a: torch.Tensor, b: torch.Tensor) -> str:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        return "takes (m, k) and (k, n) of one data type"
    return ""


def _not_multiples(a: torch.Tensor, b: torch.Tensor, *, rows: int, cols: int, depth: int) -> str:
    if reason := _not_factors(a, b):
        return reason
    fits = a.shape[0] % rows == 0 and b.shape[1] % cols == 0 and a.shape[1] % depth == 0
    return "" if fits else f"takes m that {rows} divides, n that {cols} divides, k that {depth} divides"


def _inputs(shape: Shape, dtype: str, device: str, seed: int) -> tuple[torch.Tensor, ...]:
    import torch

    generator = torch.Generator(device=device).manual_seed(seed)
    sizes = ((shape["m"], shape["k"]), (shape["k"], shape["n"]))
    return tuple(torch.randn(*size, device=device, generator=generator).to(getattr(torch, dtype)) for size in sizes)


def _cost(shape: Shape, dtype: str) -> Cost:
    return find_cost("matmul")(shape, dtype, "fwd")


def _rung(name: str, depth: int, change: str, dtype: str = "float32", shared_bytes: int = 0) -> Rung:
    kernel = f"matmul_{name}"
    return Rung(
        name=name,
        kernels=(kernel,),
        launch=functools.partial(_blocks, kernel=kernel, shared_bytes=shared_bytes),
        change=change,
        dtypes=(dtype,),
        why_not=functools.partial(_not_multiples, rows=BLOCK, cols=BLOCK, depth=depth),
    )


MATMUL = Ladder(
    name="matmul",
    source="matmul.cu",
    summary="a matrix product, c = a @ b",
    reference=reference,
    inputs=_inputs,
    cost=_cost,
    shapes={"float32": ({"m": 4096, "n": 4096, "k": 4096},), "float16": ({"m": 8192, "n": 8192, "k": 8192},)},
    test_shapes=(
        {"m": 1, "n": 1, "k": 1},
        {"m": 33, "n": 65, "k": 31},
        {"m": 128, "n": 256, "k": 64},
        {"m": 256, "n": 256, "k": 320},
    ),
    rungs=(
        Rung(
            name="naive",
            kernels=("matmul_naive",),
            launch=_naive,
            change="One thread makes one element of c: 2 k reads for 2 k operations. The 32 lanes of a warp read the "
            "same element of a and 32 neighbours of b, so caches catch most of it; every multiplication still waits "
            "for two loads. Sums are taken 64 products at a time and then added up, as cuBLAS does: one chain over k "
            "had 2.1 times its error on an H200 at k = 320, more than the rule allows.",
            why_not=_not_factors,
        ),
        Rung(
            name="tiled",
            kernels=("matmul_tiled",),
            launch=_tiled,
            change="A block loads tiles of 32 x 32 of a and b into shared memory and uses each element 32 times. "
            "Global memory is read 32 times less; now each multiplication waits for two reads of shared memory, which "
            "has an eighth of the rate that the arithmetic would need.",
            why_not=_not_factors,
        ),
        _rung(
            "registers",
            8,
            "A thread makes 8 x 8 elements of c in registers: 8 of a and 8 of b give 64 multiplications, so shared "
            "memory is read 8 times less for each. A block makes 128 x 128, and global memory is read 4 times less "
            "than before. The totals, to which every 64 products are added, lie in 64 KiB of shared memory: in "
            "registers they would cost the second block of a multiprocessor.",
            shared_bytes=TOTALS_SHARED_BYTES,
        ),
        _rung(
            "vectorised",
            8,
            "The same tiles by accesses of 16 bytes, from global and from shared memory: a quarter of the load "
            "instructions, which take issue slots from the multiplications.",
            shared_bytes=TOTALS_SHARED_BYTES,
        ),
        _rung(
            "pipelined",
            16,
            "Two tiles of each operand take turns: cp.async brings the next one from global to shared memory, past the "
            "registers, while this one is multiplied, so that a block no longer stands still for each tile's way here.",
        ),
        _rung(
            "half2",
            16,
            "fp16 in memory: half the bytes, eight elements an access, read from shared memory in pairs. Products and "
            "sums stay in fp32: sums in fp16 (HFMA2, twice the rate) have 72 times "
            "PyTorch's error at k = 4096.",
            dtype="float16",
        ),
        _rung(
            "wmma",
            32,
            "Tensor cores through CUDA's C++: a warp multiplies 16 x 16 x 16 as one, 8192 operations where an FMA of a "
            "warp makes 64. The tiles are as before; what feeds the tensor cores is now the limit.",
            dtype="float16",
        ),
        Rung(
            name="mma",
            kernels=("matmul_mma",),
            launch=functools.partial(_mma, kernel="matmul_mma", shared_bytes=MMA_SHARED_BYTES),
            dtypes=("float16",),
            change="The instruction itself, mma.sync, with all that feeds it: 64 x 64 of c a warp, so that 8 loads "
            "from shared memory (ldmatrix) serve 32 mma; three stages of cp.async in 144 KiB of shared memory; chunks "
            "swizzled, so that ldmatrix meets no bank twice; the next operands loaded while these are multiplied; "
            "blocks in an order that shares rows and columns in the L2.",
            why_not=functools.partial(_not_multiples, rows=MMA_ROWS, cols=MMA_COLS, depth=MMA_DEPTH),
        ),
        Rung(
            name="wgmma",
            kernels=("matmul_wgmma",),
            source="matmul_hopper.cu",
            launch=functools.partial(_mma, kernel="matmul_wgmma", shared_bytes=WGMMA_SHARED_BYTES),
            dtypes=("float16",),
            change="Hopper's own instruction, in a file of its own (matmul_hopper.cu): 128 threads multiply "
            "64 x 256 x 16 together, both operands straight from shared memory, where mma.sync passes "
            "each through registers, once for every warp; the threads go on while it is computed, so that the copies "
            "of the stage after next are under way meanwhile. Only sm_90 has it. What is left to Hopper is TMA, which "
            "copies a whole tile by one thread's instruction; the Gluon kernels of docs/products.md have it.",
            why_not=functools.partial(_not_multiples, rows=MMA_ROWS, cols=MMA_COLS, depth=MMA_DEPTH),
        ),
    ),
)
