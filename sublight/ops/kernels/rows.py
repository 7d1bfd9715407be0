"""What row-wise ops share: seeing a tensor as rows, how much of it one program takes, and passing values between
programs of one launch."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from sublight.backend.device import is_interpreted, takes_ptx, why_not_here
from sublight.backend.jit import AVAILABLE, next_power_of_2, tl, triton
from sublight.correct import Inputs
from sublight.cost import Shape

MAX_COLS = 2**18
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SMALL_ROWS = (1, 16, 128)
NORM_WIDTHS = (768, 1024, 1600, 2048, 2560, 4096, 5120, 8192, 12288, 16384, 32768, 50257, 65536)
NORM_TEST_SHAPES: tuple[Shape, ...] = tuple(
    {"rows": rows, "cols": cols}
    for rows, cols in (
        *((1, 1), (3, 127), (65, 128), (17, 129), (5, 2049), (40, 5000)),
        *((3, 16385), (33, 20000), (2, 65537)),
    )
)
ODD_WIDTHS = "rows of odd width begin anywhere, so their elements move one by one; lanes side by side"  # Kernel.narrow
HAS_ASSEMBLY = tl.constexpr(takes_ptx())  # decided when Triton loads, as the interpreter is
ELEMENTS = 2**27  # of a large benchmark shape: 256 MB of bf16 each way


def block_for(cols: int) -> int:
    return max(16, next_power_of_2(cols))


def split(cols: int) -> tuple[int, int]:
    """A row as two blocks, each a power of two as Triton wants them, so that few threads are idle; 0: no second.

    >>> split(4096), split(5120), split(1600), split(3)
    ((4096, 0), (4096, 1024), (1024, 1024), (16, 0))
    """
    block = 1 << (cols.bit_length() - 1)
    if cols <= 16 or block == cols:
        return max(16, block_for(cols)), 0
    return block, block_for(cols - block)


class Rows(NamedTuple):
    """A tensor (…, cols) as the kernels see it: rows of neighbouring columns, `apart` elements from one to the next."""

    rows: int
    cols: int
    apart: int
    itemsize: int
    is_aligned: bool  # the first row begins at a 16-byte boundary
    is_copy: bool = False  # the tensor has no such layout, and is copied into one piece first

    @property
    def is_whole(self) -> bool:
        """Whether vectors fill the rows. Triton knows of a number only whether 16 divides it."""
        return self.cols % 16 == 0 and self.apart % 16 == 0 and self.is_aligned

    @property
    def is_packed(self) -> bool:
        """Whether `forget` can keep these rows in their 16-bit form: it needs pairs, so rows loaded by vectors. The
        inline assembly is not for the interpreter."""
        return self.itemsize == 2 and self.is_whole and not is_interpreted()

    @property
    def in_one_piece(self) -> Rows:
        """The row layout of a contiguous tensor that the call makes."""
        return self._replace(apart=self.cols, is_aligned=True, is_copy=False)


def rows_of(x: torch.Tensor) -> Rows:
    """
    >>> rows_of(torch.empty(2, 3, 8))[:3], rows_of(torch.empty(6, 16)[:, :8])[:3], rows_of(torch.empty(8, 4).T).is_copy
    ((6, 8, 8), (6, 8, 16), True)
    """
    *sizes, cols = x.shape
    *strides, step = x.stride()
    rows, apart, span, is_copy = 1, cols, cols, step != 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if rows == 1:
            apart = stride
        elif stride != span:  # the next entry of an outer dimension does not begin where another row would
            is_copy = True
        rows, span = rows * size, stride * size
    if is_copy:
        return Rows(rows, cols, cols, x.element_size(), is_aligned=True, is_copy=True)
    return Rows(rows, cols, apart, x.element_size(), is_aligned=x.data_ptr() % 16 == 0)


def copies_of(**needed: bool) -> tuple[str, ...]:
    """The names of arguments that are copied first.

    >>> copies_of(x=False, weight=True)
    ('weight',)
    """
    return tuple(name for name, is_needed in needed.items() if is_needed)


def is_packed(*tensors: torch.Tensor) -> bool:
    """Whether `forget` can keep these rows in their 16-bit form: it needs pairs, so rows that are loaded by vectors.

    Triton knows of a number only whether 16 divides it. The inline assembly is not for the interpreter.
    """
    return not is_interpreted() and all(
        x.element_size() == 2 and x.shape[1] % 16 == 0 and x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
        for x in tensors
    )


def sums_of(x: torch.Tensor) -> Literal["plain", "carried", "double"]:
    """How `sum_of` adds up: an fp32 result would show what a plain sum loses, the interpreter's own included."""
    if x.element_size() == 2:
        return "plain"
    return "double" if is_interpreted() else "carried"


def is_ragged(x: Rows, y: Rows) -> bool:
    """Rows that start anywhere, though both tensors start at a boundary: worth moving by vectors all the same."""
    vector = 16 // x.itemsize
    return x.is_aligned and y.is_aligned and x.cols % 16 != 0 and x.apart % vector == y.apart % vector


def why_no_kernel(x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = DTYPES) -> str:
    """Why no kernel of ours runs here on such a tensor; empty where one does."""
    if not AVAILABLE:
        return "triton is not installed"
    if reason := why_not_here(x):
        return reason
    return "" if x.dtype in dtypes else f"no kernel of ours for {str(x.dtype).removeprefix('torch.')}"


def why_torch(x: torch.Tensor, *others: torch.Tensor | None) -> str:
    """Why a call on these rows goes to PyTorch; empty where one of our kernels takes it."""
    if reason := why_no_kernel(x):
        return reason
    if x.dim() == 0 or x.numel() == 0:
        return "nothing to do for a tensor without rows"
    if x.shape[-1] > MAX_COLS:
        return f"rows wider than {MAX_COLS} columns"
    for other in others:
        if other is None:
            return "an optional argument is missing"
        if other.dtype != x.dtype or other.device != x.device:
            return "the arguments differ in data type or device"
    return ""


def generator_for(device: str, seed: int) -> torch.Generator | None:
    """Seeded; tensors without data (device "meta", as kernels are compiled for) need none."""
    return None if device == "meta" else torch.Generator(device=device).manual_seed(seed)


def random_rows(shape: Shape, dtype: str, device: str, seed: int, *, scale: float = 1.0) -> torch.Tensor:
    generator = generator_for(device, seed)
    x = torch.randn(shape["rows"], shape["cols"], generator=generator, device=device, dtype=getattr(torch, dtype))
    return x.mul_(scale)


def random_columns(shape: Shape, dtype: str, device: str, seed: int, count: int) -> Inputs:
    """Weights and biases: values about one, as trained networks have them."""
    generator = generator_for(device, seed + 1_000_003)
    size, kind = shape["cols"], getattr(torch, dtype)
    return tuple(1 + torch.randn(size, generator=generator, device=device, dtype=kind) / 4 for _ in range(count))


def row_shapes(widths: tuple[int, ...]) -> tuple[Shape, ...]:
    """Every width with enough rows to fill the memory bus, then small batches of three of them."""
    large = [{"rows": max(1, ELEMENTS // cols), "cols": cols} for cols in widths]
    small = [{"rows": rows, "cols": cols} for cols in widths[1::6] for rows in SMALL_ROWS]
    return (*large, *small)


@triton.jit
def forget(x, after, PACKED: tl.constexpr):
    """The same 16-bit values, of which the compiler no longer knows that it has converted them to fp32.

    It would otherwise keep the fp32 copies alive from one pass over a row to the next, at twice the registers. The
    zero that is xored in depends on `after`, a result of the pass that has ended, so nothing can be moved across; it is
    zero because no 16-bit number is -3.0e38, and no sum of them gets there without passing on to infinity.
    """
    if PACKED and HAS_ASSEMBLY:
        zero = tl.zeros_like(x).to(tl.int16, bitcast=True) + (after == -3.0e38).to(tl.int16)
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, $2;", "=r,r,r", [x, zero], dtype=x.dtype, is_pure=True, pack=2
        )
    else:
        return x


@triton.jit
def aligned_as(cols):
    """Zero, of which the compiler knows no more than of cols: whether 16 divides it. For the places in a weight.

    A weight begins at a boundary where rows of odd width do not, and its layout would become that of the rows: each
    thread with neighbours that it then moves one by one, 16 sectors a request where lanes side by side take 4.
    """
    return tl.where(tl.program_id(0) < 0, cols, 0)  # never: the compiler sees that once the layout is chosen


@triton.jit
def add_pairs(a, a_rest, b, b_rest):
    """Sums that carry along what rounding took from them (Knuth's two-sum)."""
    total = a + b
    b_part = total - a
    rest = (a - (total - b_part)) + (b - b_part)
    return total, rest + a_rest + b_rest


@triton.jit
def sum_of(x, axis: tl.constexpr, SUMS: tl.constexpr):
    """The sum of x, as if it had been added up exactly and rounded once unless SUMS is "plain".

    A thread adds up to 64 values one after the other, which costs an fp32 result digits that PyTorch's shorter chains
    keep; 16-bit results do not show it.
    """
    if SUMS == "carried":
        total, rest = tl.reduce((x, tl.zeros_like(x)), axis, add_pairs)
        return tl.where(rest == rest, total + rest, total)  # the rest of an infinite sum is no number
    elif SUMS == "double":  # the interpreter takes a reduction by pairs one element at a time
        return tl.sum(x.to(tl.float64), axis).to(tl.float32)
    else:
        return tl.sum(x, axis)


@triton.jit
def publish(ptr, first, second, mask):
    """Two fp32 values in one 64-bit word, so that who sees it change from zero sees both."""
    high = first.to(tl.int32, bitcast=True).to(tl.int64) << 32
    low = second.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.atomic_xchg(ptr, high | low, mask=mask, sem="relaxed")


@triton.jit
def collect(ptr, parts, PARTS: tl.constexpr):
    """Wait until all parts of a row are published, by programs with smaller numbers, which therefore run already."""
    part = tl.arange(0, PARTS)
    words = tl.load(ptr + part, mask=part < parts, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), 0) == 0:
        words = tl.load(ptr + part, mask=part < parts, other=1, volatile=True)
    first = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    second = words.to(tl.int32).to(tl.float32, bitcast=True)
    return tl.where(part < parts, first, -float("inf")), tl.where(part < parts, second, 0.0)


@triton.jit
def chunk_places(offset, part, cols, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Where the part-th chunk of the row at `offset` lies, and what of it is inside.

    A row of odd width starts anywhere, and Triton would move it element by element. So with VECTOR > 1 chunks start at
    the 16-byte boundary before the row, and only vectors that lie wholly inside it count; `end_places` has the rest.
    """
    place = part * BLOCK + tl.arange(0, BLOCK)
    if VECTOR == 1:
        return offset + place, place < cols
    else:
        lead = (offset % VECTOR).to(tl.int32)
        vector = place // VECTOR * VECTOR
        return offset // VECTOR * VECTOR + place, (vector >= lead) & (vector + VECTOR <= lead + cols)


@triton.jit
def end_places(offset, part, cols, VECTOR: tl.constexpr):
    """The elements at a row's two ends that fill no vector, as the program of its first part takes them."""
    lane = tl.arange(0, 2 * VECTOR)
    lead = (offset % VECTOR).to(tl.int32)
    last = (lead + cols) // VECTOR * VECTOR  # where the vector begins that the row's end cuts
    place = tl.where(lane < VECTOR, lane, last + lane - VECTOR)
    front = tl.where(lead > 0, tl.minimum(VECTOR, lead + cols), 0)  # of a row of no columns: nothing
    limit = tl.where(part == 0, tl.where(lane < VECTOR, front, lead + cols), 0)
    return offset // VECTOR * VECTOR + place, (place >= lead) & (place < limit)
