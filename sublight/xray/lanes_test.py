"""Where each element lies is what Triton's own layout code says, and TTGIR is read as Triton writes it."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from typing import Any

import pytest

from sublight.xray import lanes
from sublight.xray.lanes import NotDrawn, Shared, Spread

BLOCKED = "#ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [8, 4], warpsPerCTA = [4, 1], order = [1, 0]}>"
TALL = "#ttg.blocked<{sizePerThread = [2, 1], threadsPerWarp = [16, 2], warpsPerCTA = [2, 4], order = [0, 1]}>"
AMPERE = "#ttg.nvidia_mma<{versionMajor = 2, versionMinor = 0, warpsPerCTA = [2, 2], instrShape = [16, 8]}>"
HOPPER = "#ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 64, 16]}>"
WIDE = "#ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 2], instrShape = [16, 32, 16]}>"
LINEAR = (
    "#ttg.linear<{register = [[0, 1], [8, 0], [32, 0]], lane = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], "
    "warp = [[16, 0], [0, 8]], block = []}>"
)
DOWN = (
    "#ttg.linear<{register = [[1, 0], [0, 8], [2, 0]], lane = [[4, 0], [0, 1], [8, 0], [0, 2], [0, 4]], "
    "warp = [[0, 0], [16, 0]], block = []}>"
)


ASK = """
import json, sys
from triton._C.libtriton import gluon_ir, ir
from triton.experimental.gluon.language import _layouts as g
context = ir.context()
ir.load_dialects(context)
builder = gluon_ir.GluonOpBuilder(context)
for expression, shape in json.load(sys.stdin):
    found = builder.to_linear_layout(eval(expression)._to_ir(builder), shape)
    print(json.dumps({name: getattr(found, name) for name in dir(found) if name.endswith("_bases")}))
"""


@functools.cache
def _answers() -> dict[tuple[str, tuple[int, ...]], dict[str, Any]] | str:
    """Of every layout that is asked about; in a process of its own, since Triton's bindings complain at its end."""
    asked = json.dumps(ASKED)
    done = subprocess.run([sys.executable, "-c", ASK], input=asked, capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()
    if len(lines) != len(ASKED):
        return (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return {
        (expression, tuple(shape)): json.loads(line) for (expression, shape), line in zip(ASKED, lines, strict=True)
    }


def triton_says(expression: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Triton's own bases of a layout, written in Gluon's classes."""
    pytest.importorskip("triton")
    answers = _answers()
    if isinstance(answers, str):
        pytest.skip(f"this Triton does not say where elements lie: {answers}")
    return answers[expression, shape]


def bases(found: dict[str, Any]) -> tuple[list[list[int]], ...]:
    return found["reg_bases"], found["lane_bases"], found["warp_bases"]


LINEAR_BASES = "[[0, 1], [8, 0], [32, 0]], [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], [[16, 0], [0, 8]]"
DOWN_BASES = "[[1, 0], [0, 8], [2, 0]], [[4, 0], [0, 1], [8, 0], [0, 2], [0, 4]], [[0, 0], [16, 0]]"
DISTRIBUTED = {
    "blocked": (BLOCKED, "g.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])"),
    "blocked by columns": (TALL, "g.BlockedLayout([2, 1], [16, 2], [2, 4], [0, 1])"),
    "linear": (LINEAR, f"g.DistributedLinearLayout({LINEAR_BASES}, [], [64, 16])"),
    "linear by columns": (DOWN, f"g.DistributedLinearLayout({DOWN_BASES}, [], [32, 16])"),
    "mma of Ampere": (AMPERE, "g.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])"),
    "mma of Hopper": (HOPPER, "g.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])"),
    "mma of Hopper by 8 warps": (WIDE, "g.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])"),
}


SHAPES = [(64, 64), (128, 128), (16, 256), (16, 16)]
SLICED = [(0, (64,)), (1, (64,)), (1, (256,)), (0, (4,))]
WITH_SLICES = ("blocked", "blocked by columns", "mma of Ampere")
OPERANDS = [(0, 2), (1, 2), (0, 4), (1, 1)]


@pytest.mark.parametrize("name", DISTRIBUTED)
@pytest.mark.parametrize("shape", SHAPES)
def test_registers_as_triton_says(name: str, shape: tuple[int, ...]) -> None:
    text, build = DISTRIBUTED[name]
    found = lanes.place(text, shape, "f32", {})
    assert isinstance(found, Spread)
    mine = tuple([list(basis) for basis in each] for each in (found.register, found.lane, found.warp))
    assert mine == bases(triton_says(build, shape))


@pytest.mark.parametrize(("dim", "shape"), SLICED)
@pytest.mark.parametrize("name", WITH_SLICES)
def test_slices_as_triton_says(name: str, dim: int, shape: tuple[int, ...]) -> None:
    text, build = DISTRIBUTED[name]
    found = lanes.place(f"#ttg.slice<{{dim = {dim}, parent = #p}}>", shape, "f32", {"p": text})
    assert isinstance(found, Spread)
    theirs = triton_says(f"g.SliceLayout({dim}, {build})", shape)
    mine = tuple([list(basis) for basis in each] for each in (found.register, found.lane, found.warp))
    assert mine == bases(theirs)


@pytest.mark.parametrize(("index", "together"), OPERANDS)
def test_operands_of_tensor_cores_as_triton_says(index: int, together: int) -> None:
    found = lanes.place(
        f"#ttg.dot_op<{{opIdx = {index}, parent = #mma, kWidth = {together}}}>", (64, 64), "f16", {"mma": AMPERE}
    )
    assert isinstance(found, Spread)
    theirs = triton_says(f"g.DotOperandLayout({index}, {DISTRIBUTED['mma of Ampere'][1]}, {together})", (64, 64))
    mine = tuple([list(basis) for basis in each] for each in (found.register, found.lane, found.warp))
    assert mine == bases(theirs)


SHARED = {
    "swizzled": (
        "#ttg.swizzled_shared<{vec = 8, perPhase = 1, maxPhase = 8, order = [1, 0]}>",
        "g.SwizzledSharedLayout(8, 1, 8, [1, 0])",
        (16, 64),
    ),
    "swizzled by columns": (
        "#ttg.swizzled_shared<{vec = 4, perPhase = 2, maxPhase = 4, order = [0, 1]}>",
        "g.SwizzledSharedLayout(4, 2, 4, [0, 1])",
        (32, 16),
    ),
    "plain": (
        "#ttg.swizzled_shared<{vec = 1, perPhase = 1, maxPhase = 1, order = [0]}>",
        "g.SwizzledSharedLayout(1, 1, 1, [0])",
        (64,),
    ),
    "for tensor cores": (
        "#ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = false, elementBitWidth = 16}>",
        "g.NVMMASharedLayout(128, 16, 2)",
        (16, 128),
    ),
    "for tensor cores, narrow": (
        "#ttg.nvmma_shared<{swizzlingByteWidth = 32, transposed = false, elementBitWidth = 16}>",
        "g.NVMMASharedLayout(32, 16, 2)",
        (32, 16),
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_memory_as_triton_says(name: str) -> None:
    text, build, shape = SHARED[name]
    found = lanes.place(text, shape, "f16", {})
    assert isinstance(found, Shared)
    theirs = triton_says(build, shape)["offset_bases"]
    for offset in range(1 << len(theirs)):
        element = [0] * len(shape)
        for bit, basis in enumerate(theirs):
            if offset >> bit & 1:
                element = [here ^ more for here, more in zip(element, basis, strict=True)]
        assert found.offsets[tuple(element)] == offset


ASKED = [
    *((build, shape) for _, build in DISTRIBUTED.values() for shape in SHAPES),
    *((f"g.SliceLayout({dim}, {DISTRIBUTED[name][1]})", shape) for name in WITH_SLICES for dim, shape in SLICED),
    *((f"g.DotOperandLayout({i}, {DISTRIBUTED['mma of Ampere'][1]}, {wide})", (64, 64)) for i, wide in OPERANDS),
    *((build, shape) for _, build, shape in SHARED.values()),
]


def test_every_element_has_a_holder_and_copies_are_counted() -> None:
    whole = lanes.place(BLOCKED, (64, 32), "f32", {})
    assert isinstance(whole, Spread)
    assert len(whole.holders) == 64 * 32 and whole.copies == 1
    assert whole.holders[(0, 5)] == [(0, 1, 1)]  # warp 0, lane 1, its second register
    small = lanes.place(BLOCKED, (8, 16), "f32", {})
    assert isinstance(small, Spread) and small.copies == 4  # four warps have the same


def test_banks() -> None:
    found = lanes.place(SHARED["swizzled"][0], (16, 64), "f16", {})
    assert isinstance(found, Shared)
    assert {found.bank((line, 0)) for line in range(8)} == set(range(0, 32, 4))  # a column of chunks: no bank twice


TTGIR = f"""
#blocked = {BLOCKED}
#mma = {AMPERE}
#shared = {SHARED["swizzled"][0]}
#smem = #ttg.shared_memory
module {{
  %a = tt.load %p : tensor<64x32x!tt.ptr<f16>, #blocked>
  %b = ttg.local_alloc %a : (tensor<64x32xf16, #blocked>) -> !ttg.memdesc<16x64xf16, #shared, #smem>
  %x = foo : tensor<64x16xf16, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = 2}}>>
  %c = tt.dot %x, %y : tensor<64x64xf32, #mma>
  %d = "tt.reduce"(%c) : tensor<64xf32, #ttg.slice<{{dim = 1, parent = #mma}}>>
  %e = foo : tensor<48x64xf32, #mma>
}}
"""


def test_ttgir_is_read() -> None:
    found = {(each.name, each.shape): each for each in lanes.layouts(TTGIR)}
    assert [name.split("<")[0] for name, _ in found] == ["blocked", "dot_op", "mma", "slice", "mma", "shared"]
    assert isinstance(found["mma", (64, 64)].where, Spread) and isinstance(found["shared", (16, 64)].where, Shared)
    odd = found["mma", (48, 64)]
    assert odd.where is None and odd.why_not == "48x64 is no power of two"


def test_one_buffer_of_a_ring_is_drawn() -> None:
    """Of barriers, whose layout has one dimension fewer than the memory, and of tiles for tensor cores."""
    barriers = "#ttg.swizzled_shared<{vec = 1, perPhase = 1, maxPhase = 1, order = [0]}>"
    assert lanes.place(barriers, (4, 1), "i64", {}) == Shared(shape=(1,), item_bits=64, offsets={(0,): 0})
    tiles = "#ttg.nvmma_shared<{swizzlingByteWidth = 128, transposed = false, elementBitWidth = 16}>"
    assert lanes.place(tiles, (4, 64, 64), "f16", {}) == lanes.place(tiles, (64, 64), "f16", {})


@pytest.mark.parametrize("text", ["#ttg.padded_shared<[512:+8] {order = [1, 0]}>", "#unknown"])
def test_what_is_not_known_is_named(text: str) -> None:
    with pytest.raises(NotDrawn, match=r"padded_shared|unknown"):
        lanes.place(text, (64, 64), "f16", {})
