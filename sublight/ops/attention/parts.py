"""What the attention kernels share: tiles of q, k and v, scores, where tensors lie, and how results are laid out."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from sublight.backend.device import Facts, is_interpreted
from sublight.backend.jit import libdevice, next_power_of_2, tl, triton
from sublight.backend.launch import View
from sublight.op import Buffer
from sublight.ops.attention.masks import Mask

LOG2_E = 1.4426950408889634
INTERPRETED = tl.constexpr(is_interpreted())  # which has no library of CUDA's
HEAD_DIMS = (16, 256)
L2_KEYS = 32768  # keys and values of heads that run at the same time, so that the L2 holds them: 16 MB of D128 in bf16


@triton.jit
def rows_at(
    ptr, start, stride, count, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr
):
    """(ROWS, WIDTH) from row `start` on, zeros past `count` rows and HEAD_DIM columns; EVEN: no row is past."""
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    places = ptr + (tl.full([], 0, tl.int64) + start) * stride + row * stride + col
    if EVEN and HEAD_DIM == WIDTH:
        return tl.load(places)
    elif EVEN:
        return tl.load(places, mask=col < HEAD_DIM, other=0.0)
    elif HEAD_DIM == WIDTH:
        return tl.load(places, mask=start + row < count, other=0.0)
    else:
        return tl.load(places, mask=(start + row < count) & (col < HEAD_DIM), other=0.0)


@triton.jit
def tile_at(
    x, batch, head, start, stride, count, COPY_ENGINE: tl.constexpr,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The same, of a descriptor by the copy engine, or of a pointer to where the head begins."""
    if COPY_ENGINE:
        return x.load([batch, head, start, 0]).reshape([ROWS, WIDTH])
    else:
        return rows_at(x, start, stride, count, HEAD_DIM, ROWS, WIDTH, EVEN)


@triton.jit
def begin_of(x, batch, head, batch_stride, head_stride, COPY_ENGINE: tl.constexpr):
    """Where a head begins; a descriptor takes its number at each load."""
    return x if COPY_ENGINE else head_at(x, batch, head, batch_stride, head_stride)


@triton.jit
def store_rows(ptr, x, start, stride, count, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    places = ptr + (tl.full([], 0, tl.int64) + start) * stride + row * stride + col
    inside = start + row < count
    if HEAD_DIM != WIDTH:
        inside = inside & (col < HEAD_DIM)
    tl.store(places, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def head_at(ptr, batch, head, batch_stride, head_stride):
    """Where a head begins: offsets may pass 2**31."""
    return ptr + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """EXACT for fp32; 16-bit inputs do not see what two quick instructions lose."""
    if INTERPRETED:
        e = tl.exp(2.0 * x.to(tl.float64))
        return ((e - 1.0) / (e + 1.0)).to(tl.float32)
    elif EXACT:
        return libdevice.tanh(x)
    else:
        return 1.0 - 2.0 / (tl.exp2(2.8853900817779268 * x) + 1.0)  # 2 log2(e)


@triton.jit
def scores_of(product, scale, softcap, SOFTCAP: tl.constexpr, EXACT: tl.constexpr):
    """Scores as `power` wants them; without a cap `scale` holds the factor for that already."""
    if SOFTCAP:
        capped = tanh(product * (scale / softcap), EXACT) * softcap
        return capped if EXACT else capped * 1.4426950408889634
    else:
        return product * scale


@triton.jit
def exp(x, EXACT: tl.constexpr):
    """EXACT: CUDA's expf; else what the hardware has, whose error grows with |x|."""
    return libdevice.exp(x) if EXACT and not INTERPRETED else tl.exp(x)


@triton.jit
def log(x, EXACT: tl.constexpr):
    return libdevice.log(x) if EXACT and not INTERPRETED else tl.log(x)


@triton.jit
def power(x, EXACT: tl.constexpr):
    """The exponential of a score less another. Those of 16-bit inputs are in units of log(2), since exp2 is what the
    hardware has; an fp32 result would see that rounding, and takes CUDA's expf."""
    if EXACT:
        return exp(x, EXACT)
    else:
        return tl.exp2(x)


@triton.jit
def log_sum(top, total, EXACT: tl.constexpr):
    """The natural logarithm of a row's sum of exponentials, -inf of none."""
    if EXACT:
        return top + log(total, EXACT)
    else:
        return (top + tl.log2(total)) * 0.6931471805599453


@triton.jit
def store_sums(lse_ptr, sums_ptr, place, plane, inside, top, total, EXACT: tl.constexpr):
    """Of each row the logarithm of its sum; with EXACT the two parts of it as well, for the backward pass."""
    tl.store(lse_ptr + place, log_sum(top, total, EXACT), mask=inside)
    if EXACT:
        tl.store(sums_ptr + place, top, mask=inside)
        tl.store(sums_ptr + plane + place, total, mask=inside)


@triton.jit
def load_sums(ptr, place, plane, inside, EXACT: tl.constexpr):
    """What `weights_of` takes, of rows that are not inside so that they have no weight."""
    top = tl.load(ptr + place, mask=inside, other=float("inf"))
    if EXACT:
        return top, tl.load(ptr + plane + place, mask=inside, other=1.0)
    else:
        return top * 1.4426950408889634, top


@triton.jit
def weights_of(scores, top, total, EXACT: tl.constexpr):
    """The weights of scores again: exp(score - lse). In fp32 an lse that is rounded would be seen where scores are
    large, so its parts are kept: exp(score - top) / total."""
    return power(scores - top, EXACT) / total if EXACT else power(scores - top, EXACT)


class Sizes(NamedTuple):
    """The sizes of one call."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int

    @property
    def rows(self) -> int:
        """Queries of all heads."""
        return self.batch * self.heads * self.q_len

    @property
    def share(self) -> int:
        """Query heads that read the same keys."""
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        """Of a tile's rows: the head's size, made a power of two."""
        return max(16, next_power_of_2(self.head_dim))

    def together(self, limit_keys: int = L2_KEYS) -> int:
        """So many heads take turns, that their keys and values stay in the L2; it divides the number of heads."""
        heads = self.batch * self.heads
        most = max(1, min(8 * self.share, self.share * limit_keys // max(self.kv_len, 1)))
        return max(each for each in range(1, min(most, heads) + 1) if heads % each == 0)


def sizes_of(q: torch.Tensor, k: torch.Tensor) -> Sizes:
    batch, heads, q_len, head_dim = q.shape
    return Sizes(batch, heads, k.shape[1], q_len, k.shape[2], head_dim)


def why_no_head(head_dim: int) -> str:
    """Why our kernels do not take heads of this size; empty where they do."""
    if head_dim % 8 or not HEAD_DIMS[0] <= head_dim <= HEAD_DIMS[1]:
        return f"heads of {head_dim}: ours take multiples of 8 from {HEAD_DIMS[0]} to {HEAD_DIMS[1]}"
    return ""


def is_row_major(x: torch.Tensor) -> bool:
    """Whether kernels can read it as it is: a head's elements side by side; anything else is copied first."""
    return x.stride(3) == 1


def copies_of(**tensors: torch.Tensor) -> tuple[str, ...]:
    """The tensors that are made contiguous first."""
    return tuple(name for name, x in tensors.items() if not is_row_major(x))


def strides_of(x: torch.Tensor) -> tuple[int, int, int]:
    """From one batch entry, head and row to the next, as the kernels see them: of a copy, where one is made."""
    if is_row_major(x):
        return x.stride(0), x.stride(1), x.stride(2)
    _, heads, rows, cols = x.shape
    return heads * rows * cols, rows * cols, cols


def result_strides(x: torch.Tensor) -> tuple[int, int, int, int]:
    """In one piece, with heads inside of rows where x has them so: a model's next layer then needs no copy."""
    _, heads, rows, cols = x.shape
    if heads > 1 and x.stride(1) < x.stride(2):
        return rows * heads * cols, cols, heads * cols, 1
    return heads * rows * cols, rows * cols, cols, 1


def has_copy_engine(gpu: Facts, *tensors: torch.Tensor) -> bool:
    """Whether descriptors can be made of these: from Hopper on, at 16-byte boundaries, in 16-bit data types."""
    if gpu.capability < 90 or gpu.capability >= 120 or (is_interpreted() and tensors[0].device.type == "cpu"):
        return False
    return all(x.element_size() == 2 and x.data_ptr() % 16 == 0 and _is_even(x) for x in tensors)


def _is_even(x: torch.Tensor) -> bool:
    """A stride over a dimension of one may be anything: it is never taken."""
    return all(
        size == 1 or (0 < stride < 2**39 and stride % 8 == 0)
        for size, stride in zip(x.shape[:3], strides_of(x), strict=True)
    )


def view_of(shape: tuple[int, ...], strides: tuple[int, ...], rows: int, width: int) -> View:
    """A tensor for the copy engine, which brings in rows of one head; past the last row and column come zeros."""
    taken = [stride if size > 1 else math.prod(shape) for size, stride in zip(shape[:3], strides, strict=False)]
    return View(tuple(shape), (*taken, 1), (1, 1, rows, width))


def result_like(x: torch.Tensor) -> Buffer:
    return Buffer(shape=tuple(x.shape), dtype=x.dtype, strides=result_strides(x))


def sums_buffers(q: torch.Tensor) -> dict[str, Buffer]:
    """Of each query the logarithm of its sum; in fp32 also its two parts, which 16-bit inputs need not."""
    parts = 2 if q.dtype == torch.float32 else 0
    return {
        "lse": Buffer(shape=tuple(q.shape[:3]), dtype=torch.float32),
        "sums": Buffer(shape=(parts, *q.shape[:3]), dtype=torch.float32),
    }


def sums_name(q: torch.Tensor) -> str:
    """The one of them that the backward pass reads."""
    return "sums" if q.dtype == torch.float32 else "lse"


def rounding_of(x: torch.Tensor, is_invariant: bool = False) -> dict[str, bool]:
    """The option of kernels under which a score has the same bits in every pass. Else the compiler may round
    score - top once in one kernel and twice in another, as a mask lies between or not: in fp32 a weight near 1 is then
    off by half an ulp of its score, and its gradient, a small difference, by as much. The batch-invariant mode wants
    the same bits of several kernels in every data type."""
    return {"enable_fp_fusion": False} if is_invariant or x.dtype == torch.float32 else {}


def exponent_scale(x: torch.Tensor, scale: float, softcap: float) -> float:
    """What products are multiplied by to be scores: see `power`; a cap comes before that."""
    return scale if softcap or x.dtype == torch.float32 else scale * LOG2_E


def flags(mask: Mask, softcap: float) -> dict[str, bool]:
    """The constants of the kernels' masks and scores."""
    return {"CAUSAL": mask.causal, "WINDOW": mask.window > 0, "SOFTCAP": softcap > 0}
