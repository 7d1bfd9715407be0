"""Ops that memory bounds as the profiler writes them, against arithmetic written here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sublight.trace.costs import cost_of, no_cost
from sublight.trace.costs.trials import BF16, FP32, INT64, Case, Recorded, backward, check, leaf, plain, record
from sublight.trace.record import Detail

torch = pytest.importorskip("torch")
F = torch.nn.functional

N = 4 * 16 * 8


def stepped(kind: Any, **options: Any) -> Callable[[], Any]:
    """A step after the first, which sets up the state."""
    weight = leaf(8, 16)
    optimizer = kind([weight], **options)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return lambda: optimizer.step()


CASES = {  # call, op, family, bytes read, bytes written
    # elementwise
    "add, broadcast": Case(
        lambda: plain(4, 16, 8) + plain(4, 1, 8),
        "aten::add",
        "pointwise",
        FP32 * (N + 32),
        FP32 * N,
        flops=N,
        limit="vector_fp32",
    ),
    "mul with a number": Case(lambda: plain(4, 16, 8) * 2.0, "aten::mul", "pointwise", FP32 * N, FP32 * N, flops=N),
    "mul in place": Case(lambda: plain(4, 16, 8).mul_(plain(8)), "aten::mul_", "pointwise", FP32 * (N + 8), FP32 * N),
    "an expanded input is read once": Case(
        lambda: plain(1, 8).expand(4, 8) + plain(4, 8), "aten::add", "pointwise", FP32 * (8 + 32), FP32 * 32
    ),
    "overlapping windows share elements": Case(
        lambda: plain(10).unfold(0, 4, 1).exp(), "aten::exp", "pointwise", FP32 * 10, FP32 * 28
    ),
    "bfloat16 with float32": Case(
        lambda: plain(8, dtype=torch.bfloat16) + plain(8), "aten::add", "pointwise", (BF16 + FP32) * 8, FP32 * 8
    ),
    "bfloat16 with a number on no dimensions": Case(
        lambda: plain(8, dtype=torch.bfloat16) * torch.tensor(2.0), "aten::mul", "pointwise", BF16 * 8, BF16 * 8
    ),
    "comparisons give a byte": Case(lambda: plain(4, 16, 8) > 0, "aten::gt", "pointwise", FP32 * N, N),
    "integers divide into float32": Case(lambda: torch.arange(8) / 2, "aten::div", "pointwise", INT64 * 8, FP32 * 8),
    "gelu": Case(lambda: F.gelu(plain(64)), "aten::gelu", "pointwise", 256, 256),
    "gelu's backward": Case(
        lambda: backward(F.gelu(leaf(64))), "aten::gelu_backward", "pointwise", FP32 * 128, FP32 * 64
    ),
    "relu's backward": Case(
        lambda: backward(F.relu(leaf(64))), "aten::threshold_backward", "pointwise", FP32 * 128, FP32 * 64
    ),
    "where": Case(
        lambda: torch.where(plain(64) > 0, plain(64), plain(1)), "aten::where", "pointwise", 64 + FP32 * 65, FP32 * 64
    ),
    "addcmul": Case(
        lambda: torch.addcmul(plain(64), plain(64), plain(64)), "aten::addcmul", "pointwise", 3 * 256, 256, flops=2 * 64
    ),
    "out= is not read": Case(
        lambda: torch.clamp_min(plain(64), 0, out=plain(64)), "aten::clamp_min", "pointwise", 256, 256
    ),
    "masked_fill": Case(
        lambda: plain(4, 16).masked_fill(plain(16) > 0, 0.0),
        "aten::masked_fill",
        "pointwise",
        FP32 * 64 + 16,
        FP32 * 64,
    ),
    "native_dropout keeps a mask": Case(
        lambda: torch.native_dropout(plain(64), 0.5, True), "aten::native_dropout", "dropout", 256, 256 + 64
    ),
    "fill": Case(lambda: plain(64).fill_(1.0), "aten::fill_", "memset", 0, 256),
    "random numbers": Case(lambda: torch.empty(64).uniform_(), "aten::uniform_", "pointwise", 0, 256),
    "zeros of int64": Case(lambda: torch.zeros(3, 5, dtype=torch.int64), "aten::zeros", "memset", 0, 8 * 15),
    # data
    "copy with a cast": Case(lambda: plain(4, 16).to(torch.bfloat16), "aten::to", "copy", FP32 * 64, BF16 * 64),
    "copy with a cast, one level down": Case(
        lambda: plain(4, 16).to(torch.bfloat16), "aten::_to_copy", "copy", FP32 * 64, BF16 * 64
    ),
    "copy with a cast, at the bottom": Case(
        lambda: plain(4, 16).to(torch.bfloat16), "aten::copy_", "copy", FP32 * 64, BF16 * 64
    ),
    "contiguous": Case(lambda: plain(4, 16).t().contiguous(), "aten::contiguous", "copy", FP32 * 64, FP32 * 64),
    "cat": Case(lambda: torch.cat([plain(4, 16), plain(3, 16)]), "aten::cat", "copy", FP32 * 7 * 16, FP32 * 7 * 16),
    "stack": Case(lambda: torch.stack([plain(4), plain(4)]), "aten::stack", "copy", FP32 * 8, FP32 * 8),
    "pad": Case(lambda: F.pad(plain(4, 16), (1, 3)), "aten::constant_pad_nd", "copy", FP32 * 64, FP32 * 80),
    "embedding reads rows, not the table": Case(
        lambda: F.embedding(torch.randint(1000, (8, 4)), plain(1000, 16)),
        "aten::embedding",
        "embedding",
        INT64 * 32 + FP32 * 32 * 16,
        FP32 * 32 * 16,
    ),
    "embedding's backward writes the table": Case(
        lambda: backward(F.embedding(torch.randint(1000, (8, 4)), leaf(1000, 16))),
        "aten::embedding_dense_backward",
        "embedding",
        INT64 * 32 + FP32 * 32 * 16,
        FP32 * 1000 * 16,
    ),
    "index_select": Case(
        lambda: plain(100, 16).index_select(0, torch.arange(5)),
        "aten::index_select",
        "index",
        INT64 * 5 + FP32 * 80,
        FP32 * 80,
    ),
    "gather": Case(
        lambda: plain(4, 16).gather(1, torch.zeros(4, 2, dtype=torch.int64)),
        "aten::gather",
        "index",
        INT64 * 8 + FP32 * 8,
        FP32 * 8,
    ),
    "scatter_add in place": Case(
        lambda: plain(100).scatter_add_(0, torch.arange(5), plain(5)),
        "aten::scatter_add_",
        "index",
        INT64 * 5 + FP32 * 5 + FP32 * 5,
        FP32 * 5,
    ),
    "sort": Case(lambda: plain(4, 16).sort(1), "aten::sort", "sort", FP32 * 64, (FP32 + INT64) * 64),
    "topk": Case(lambda: plain(4, 16).topk(3, -1), "aten::topk", "sort", FP32 * 64, (FP32 + INT64) * 12),
    "fft of reals": Case(lambda: torch.fft.rfft(plain(4, 16)), "aten::_fft_r2c", "fft", FP32 * 64, 8 * 4 * 9),
    # reductions, pools, losses
    "sum": Case(lambda: plain(4, 16, 8).sum(), "aten::sum", "reduction", FP32 * N, FP32, flops=N),
    "sum over the middle": Case(lambda: plain(4, 16, 8).sum(-2), "aten::sum", "reduction", FP32 * N, FP32 * 32),
    "mean, dimensions kept": Case(
        lambda: plain(4, 16, 8).mean((0, 1), keepdim=True), "aten::mean", "reduction", FP32 * N, FP32 * 8
    ),
    "argmax": Case(lambda: plain(4, 16, 8).argmax(1), "aten::argmax", "reduction", FP32 * N, INT64 * 32),
    "max with places": Case(lambda: plain(4, 16, 8).max(1), "aten::max", "reduction", FP32 * N, 12 * 32),
    "norm": Case(lambda: plain(4, 16, 8).norm(), "aten::linalg_vector_norm", "reduction", FP32 * N, FP32),
    "cumsum": Case(lambda: plain(4, 16, 8).cumsum(1), "aten::cumsum", "reduction", FP32 * N, FP32 * N),
    "max_pool2d": Case(
        lambda: F.max_pool2d(leaf(2, 3, 9, 9), 3, stride=2, padding=1),
        "aten::max_pool2d_with_indices",
        "reduction",
        FP32 * 6 * 81,
        12 * 6 * 25,
    ),
    "max_pool2d's backward": Case(
        lambda: backward(F.max_pool2d(leaf(2, 3, 8, 8), 2)),
        "aten::max_pool2d_with_indices_backward",
        "reduction",
        12 * 6 * 16,
        FP32 * 6 * 64,
    ),
    "avg_pool2d rounding up": Case(
        lambda: F.avg_pool2d(plain(2, 3, 8, 8), 3, ceil_mode=True),
        "aten::avg_pool2d",
        "reduction",
        FP32 * 6 * 64,
        FP32 * 6 * 9,
    ),
    "a window that would start past the edge, and elements between windows": Case(
        lambda: F.avg_pool2d(plain(2, 3, 5, 5), 1, stride=3, ceil_mode=True),
        "aten::avg_pool2d",
        "reduction",
        FP32 * 6 * 4,
        FP32 * 6 * 4,
    ),
    "adaptive_avg_pool2d": Case(
        lambda: F.adaptive_avg_pool2d(plain(2, 3, 8, 8), (2, 2)),
        "aten::_adaptive_avg_pool2d",
        "reduction",
        FP32 * 6 * 64,
        FP32 * 6 * 4,
    ),
    "upsample by a factor": Case(
        lambda: F.interpolate(plain(2, 3, 8, 8), scale_factor=2),
        "aten::upsample_nearest2d",
        "pointwise",
        FP32 * 6 * 64,
        FP32 * 6 * 256,
    ),
    "upsample's backward": Case(
        lambda: backward(F.interpolate(leaf(2, 3, 8, 8), size=(5, 5), mode="bilinear")),
        "aten::upsample_bilinear2d_backward",
        "pointwise",
        FP32 * 6 * 25,
        FP32 * 6 * 64,
    ),
    "cross entropy": Case(
        lambda: F.cross_entropy(plain(8, 10), torch.randint(10, (8,))),
        "aten::cross_entropy_loss",
        "loss",
        FP32 * 80 + INT64 * 8,
        FP32,
    ),
    "nll_loss picks": Case(
        lambda: F.cross_entropy(plain(8, 10), torch.randint(10, (8,))),
        "aten::nll_loss_forward",
        "loss",
        (FP32 + INT64) * 8,
        FP32,
    ),
    "nll_loss's backward": Case(
        lambda: F.cross_entropy(leaf(8, 10), torch.randint(10, (8,))).backward(),
        "aten::nll_loss_backward",
        "loss",
        INT64 * 8,
        FP32 * 80,
    ),
    "mse_loss": Case(lambda: F.mse_loss(plain(64), plain(64)), "aten::mse_loss", "loss", 512, FP32),
    "mse_loss's backward": Case(
        lambda: F.mse_loss(leaf(64), plain(64)).backward(), "aten::mse_loss_backward", "loss", FP32 * 129, 256
    ),
    # optimizers
    "foreach, in place": Case(
        stepped(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        "aten::_foreach_add_",
        "optimizer",
        FP32 * 256,
        FP32 * 128,
    ),
    "foreach_norm": Case(
        lambda: torch._foreach_norm([plain(8, 16), plain(8)]), "aten::_foreach_norm", "optimizer", FP32 * 136, FP32 * 2
    ),
    "fused AdamW": Case(
        stepped(torch.optim.AdamW, fused=True),
        "aten::_fused_adamw_",
        "optimizer",
        FP32 * 4 * 128,  # weight, gradient, both moments
        FP32 * 3 * 128,
        flops=15 * 128,
    ),
    "fused SGD": Case(
        stepped(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
        "aten::_fused_sgd_",
        "optimizer",
        FP32 * 3 * 128,
        FP32 * 2 * 128,
    ),
}


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return record(CASES)


@pytest.mark.parametrize("name", CASES)
def test_cost_is_what_the_arithmetic_says(name: str, recorded: Recorded) -> None:
    check(CASES[name], recorded[name])


def test_every_op_on_the_way_is_known_or_bookkeeping(recorded: Recorded) -> None:
    called = {op: detail for ops in recorded.values() for op, detail in ops}
    unknown = {op for op, detail in called.items() if cost_of(op, detail) is None and not no_cost(op, detail)}
    assert unknown <= {"aten::arange", "aten::scalar_tensor", "aten::fft_rfft"}


def test_what_copies_nothing_has_no_cost(recorded: Recorded) -> None:
    cast = next(detail for op, detail in recorded["copy with a cast"] if op == "aten::to")
    turned = next(detail for op, detail in recorded["contiguous"] if op == "aten::contiguous")
    assert not no_cost("aten::to", cast) and not no_cost("aten::contiguous", turned)
    dense = Detail(dims=((4, 16), ()), types=("float", "Scalar"), strides=((16, 1), ()), concrete=("", "0"))
    same = Detail(
        dims=((4,), (), (), (), ()), types=("float", *["Scalar"] * 4), concrete=("", "6", "False", "False", "")
    )
    assert no_cost("aten::contiguous", dense) and cost_of("aten::contiguous", dense) is None
    assert no_cost("aten::to", same) and cost_of("aten::to", same) is None
