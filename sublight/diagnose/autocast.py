"""What bfloat16 autocast does to a step: which ops change their data type, and which casts come in.

By PyTorch's lists for CUDA (ATen/autocast_mode.h): products run in bfloat16; some ops run in float32, whatever they
get; the others run in what they get, the widest of it. A trace has shapes, not tensors, so what an op gets is taken to
be the last tensor of that size, and of a second operand of one size the widest that the step has made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from sublight.diagnose.case import PRODUCTS, Case
from sublight.diagnose.fusion import CASTS, REACHED
from sublight.diagnose.work import Item
from sublight.trace.intervals import Floats
from sublight.trace.record import NONE

FULL_PRECISION = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh"),
    *("tan", "pow", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "frobenius_norm"),
    *("nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss"),
    *("multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss"),
    *("binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp"),
    *("prod", "softmax", "log_softmax", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm", "sum", "norm"),
)
INSIDE = ("native_group_norm", "nll_loss_forward", "nll_loss2d_forward", "fused_rms_norm")  # what such ops call
FULL, HALF = 4, 2  # bytes of an element
CAST_BYTES = FULL + HALF  # read one, write the other
FLASH = 0.4  # of the limit, by the flash kernels
_WIDE = ("float", "")  # the types of an operand that an op's result is as wide as


class Autocast:
    """Goes through the forward ops in their order; `factors` is what it makes of each item's time."""

    def __init__(self, case: Case, duration_s: Floats, ratio: float) -> None:
        """`duration_s`: the events' times without autocast. `ratio`: a product's time in bfloat16 by that without."""
        self._case, self._duration_s, self._ratio = case, duration_s, ratio
        self._last: dict[int, int] = {}  # by number of elements: bytes of an element of the last tensor of that size
        self._widest: dict[int, int] = {}
        self._cached: set[tuple[str, int]] = set()  # weights that were cast: autocast keeps them for the pass
        self._of_forward: dict[int, tuple[bool, float]] = {}  # by the forward op's row
        self._trains = any(case.attribution.forward(item.row) != NONE for item in case.items if item.row != NONE)

    def factors(self) -> Iterator[tuple[int, float]]:
        """How many times as long each float32 item takes, with its casts, by its place among the case's items."""
        case, start_ns = self._case, self._case.trace.start_ns
        order = sorted(
            (at for at, item in enumerate(case.items) if item.row != NONE), key=lambda at: start_ns[case.items[at].row]
        )
        ends = [end for _, end in case.steps.spans_ns]
        step = 0
        for at in order:
            item = case.items[at]
            if at in case.in_optimizer or item.dtype not in ("float32", "4-byte"):
                continue
            while step < len(ends) - 1 and start_ns[item.row] >= ends[step]:
                step, self._last, self._widest, self._cached = step + 1, {}, {}, set()
            forward = case.attribution.forward(item.row)
            yield at, self._forward(at, item) if forward == NONE else self._backward(at, item, forward)

    def _forward(self, at: int, item: Item) -> float:
        spent_s, operands = self._spent_s(at), list(self._operands(item))
        name = item.name.removeprefix("aten::").strip("_")
        if item.family in PRODUCTS:
            factor = self._product(item, spent_s)
            casts = sum(size for size, width in operands if width == FULL and not self._has_cast(item, size))
            result, width = (item.cost.write_bytes // FULL if item.cost else 0), HALF
        elif name in FULL_PRECISION or name in INSIDE:
            factor, result, width = 1.0, max((size for size, _ in operands), default=0), FULL
            casts = max((size for size, each in operands if each == HALF), default=0)
        else:
            result = max((size for size, _ in operands), default=0)
            width = max((each for _, each in operands), default=FULL)
            before = FULL * (sum(size for size, _ in operands) + result)
            after = sum(size * each for size, each in operands) + result * width
            factor, casts = after / before if before else 1.0, 0
        self._last[result] = width
        self._widest[result] = max(self._widest.get(result, HALF), width)
        for row in (item.row, *self._case.attribution.ops_above(item.row)):
            self._of_forward[row] = item.family in PRODUCTS, factor
        return factor + self._cast_s(casts) / max(spent_s, 1e-12)

    def _has_cast(self, item: Item, size: int) -> bool:
        """Whether it is a weight that the same module cast before; what an op has made is cast each time."""
        module = self._case.attribution.place(item.row)[1]
        known = size in self._last or not module or (module, size) in self._cached
        self._cached.add((module, size))
        return known and size not in self._last and bool(module)

    def _backward(self, at: int, item: Item, forward: int) -> float:
        """A gradient has its tensor's data type; what the casts of the backward pass take counts forward."""
        chain = (forward, *self._case.attribution.ops_above(forward))
        of_product, factor = next((self._of_forward[op] for op in chain if op in self._of_forward), (False, 1.0))
        if item.family in PRODUCTS:
            return self._product(item, self._spent_s(at))
        return HALF / FULL if of_product else factor

    def _product(self, item: Item, spent_s: float) -> float:
        """By the ratio of the limits, and no faster than its bytes; attention gets kernels that float32 has not."""
        limits, cost = self._case.limits, item.cost
        if cost is None:
            return self._ratio
        rate = limits.value("matmul_bf16")
        if item.family == "attention" and rate:
            return min(cost.total_flops / rate / FLASH / max(spent_s, 1e-12), 1.0)
        memory = limits.memory_rate(cost.read_bytes, cost.write_bytes)
        least_s = cost.bytes * HALF / FULL / memory if memory else 0.0
        return min(max(self._ratio, least_s / max(spent_s, 1e-12)), 1.0)

    def _operands(self, item: Item) -> Iterator[tuple[int, int]]:
        """Of each tensor that an op gets: its number of elements, and the bytes of one under autocast."""
        detail, seen = self._case.trace.detail_of(item.row), set[int]()
        lists = [part if part and isinstance(part[0], tuple) else (part,) for part in detail.dims]
        types = detail.types or ("",) * len(lists)
        for shapes, kind in zip(lists, types, strict=False):
            for shape in shapes:
                if not shape or kind not in (*_WIDE, "TensorList"):
                    continue
                size = math.prod(shape)
                known = self._widest if size in seen and item.name not in CASTS else self._last
                yield size, known.get(size, FULL)
                seen.add(size)

    def _cast_s(self, elements: int) -> float:
        """Of a cast forward, and one of the gradient where there is a backward pass."""
        rate = self._case.limits.memory_rate(FULL * elements, HALF * elements)
        return elements * CAST_BYTES / rate / REACHED * (2 if self._trains else 1) if rate and elements else 0.0

    def _spent_s(self, at: int) -> float:
        return float(np.sum(self._duration_s[self._case.events_of[at]]))
