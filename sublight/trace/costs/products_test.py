"""Products, convolutions, attention and norms as the profiler writes them, against arithmetic written here."""

from __future__ import annotations

from typing import Any

import pytest

from sublight.trace.costs import cost_of, no_cost
from sublight.trace.costs.trials import BF16, FP32, Case, Recorded, backward, check, leaf, plain, record

torch = pytest.importorskip("torch")
F = torch.nn.functional


def attend(q: Any, k: Any, **options: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, k, **options)


CASES = {  # call, op, family, bytes read, bytes written
    # products: 2·m·n·k
    "mm": Case(
        lambda: torch.mm(plain(4, 16), plain(16, 8)),
        "aten::mm",
        "matmul",
        FP32 * (4 * 16 + 16 * 8),
        FP32 * 4 * 8,
        flops=2 * 4 * 8 * 16,
        limit="matmul_fp32",
    ),
    "mm of bfloat16, transposed weight": Case(
        lambda: torch.mm(plain(4, 16, dtype=torch.bfloat16), plain(8, 16, dtype=torch.bfloat16).t()),
        "aten::mm",
        "matmul",
        BF16 * (4 * 16 + 16 * 8),
        BF16 * 4 * 8,
        flops=2 * 4 * 8 * 16,
        limit="matmul_bf16",
    ),
    "linear": Case(
        lambda: F.linear(plain(2, 4, 16), plain(8, 16), plain(8)),
        "aten::linear",
        "matmul",
        FP32 * (2 * 4 * 16 + 8 * 16 + 8),
        FP32 * 2 * 4 * 8,
        flops=2 * 8 * 8 * 16,
    ),
    "addmm": Case(
        lambda: torch.addmm(plain(8), plain(4, 16), plain(16, 8)),
        "aten::addmm",
        "matmul",
        FP32 * (8 + 4 * 16 + 16 * 8),
        FP32 * 4 * 8,
        flops=2 * 4 * 8 * 16,
    ),
    "addmm without the addend": Case(
        lambda: torch.addmm(plain(4, 8), plain(4, 16), plain(16, 8), beta=0),
        "aten::addmm",
        "matmul",
        FP32 * (4 * 16 + 16 * 8),
        FP32 * 4 * 8,
    ),
    "linear's backward: a product with an expanded gradient": Case(
        lambda: F.linear(leaf(4, 16), leaf(8, 16)).sum().backward(),
        "aten::mm",
        "matmul",
        FP32 * (1 + 4 * 16),  # the gradient of a sum is one number, expanded
        FP32 * 8 * 16,
        flops=2 * 8 * 16 * 4,
        which=1,  # the first is the forward's
    ),
    "bmm": Case(
        lambda: torch.bmm(plain(3, 4, 5), plain(3, 5, 6)),
        "aten::bmm",
        "matmul",
        FP32 * 3 * (4 * 5 + 5 * 6),
        FP32 * 3 * 4 * 6,
        flops=2 * 3 * 4 * 6 * 5,
    ),
    "einsum is the product in it": Case(
        lambda: torch.einsum("bij,bkj->bik", plain(3, 4, 5), plain(3, 6, 5)),
        "aten::bmm",
        "matmul",
        FP32 * 3 * (4 * 5 + 5 * 6),
        FP32 * 3 * 4 * 6,
        flops=2 * 3 * 4 * 6 * 5,
    ),
    "baddbmm": Case(
        lambda: torch.baddbmm(plain(3, 4, 6), plain(3, 4, 5), plain(3, 5, 6)),
        "aten::baddbmm",
        "matmul",
        FP32 * 3 * (4 * 6 + 4 * 5 + 5 * 6),
        FP32 * 3 * 4 * 6,
        flops=2 * 3 * 4 * 6 * 5,
    ),
    "matmul, broadcast batch": Case(
        lambda: torch.matmul(plain(2, 3, 4, 5), plain(5, 6)),
        "aten::matmul",
        "matmul",
        FP32 * (2 * 3 * 4 * 5 + 5 * 6),
        FP32 * 2 * 3 * 4 * 6,
        flops=2 * 2 * 3 * 4 * 6 * 5,
    ),
    "matrix and vector": Case(
        lambda: torch.mv(plain(4, 16), plain(16)),
        "aten::mv",
        "matmul",
        FP32 * (4 * 16 + 16),
        FP32 * 4,
        flops=2 * 4 * 16,
    ),
    "dot": Case(lambda: torch.dot(plain(16), plain(16)), "aten::dot", "matmul", FP32 * 32, FP32, flops=2 * 16),
    "int8": Case(
        lambda: torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 8, dtype=torch.int8)),
        "aten::_int_mm",
        "matmul",
        32 * 16 + 16 * 8,
        4 * 32 * 8,
        flops=2 * 32 * 8 * 16,
        limit="matmul_int8",
    ),
    # convolutions: 2 · outputs · channels/groups · taps
    "conv2d, strided, grouped": Case(
        lambda: F.conv2d(plain(4, 16, 8, 8), plain(32, 8, 3, 3), plain(32), stride=2, padding=1, groups=2),
        "aten::conv2d",
        "conv",
        FP32 * (4 * 16 * 64 + 32 * 8 * 9 + 32),
        FP32 * 4 * 32 * 4 * 4,
        flops=2 * 4 * 32 * 16 * 8 * 9,
        limit="matmul_fp32",
    ),
    "conv2d, one level down": Case(
        lambda: F.conv2d(plain(4, 16, 8, 8), plain(32, 8, 3, 3), plain(32), stride=2, padding=1, groups=2),
        "aten::_convolution",
        "conv",
        FP32 * (4 * 16 * 64 + 32 * 8 * 9 + 32),
        FP32 * 4 * 32 * 4 * 4,
        flops=2 * 4 * 32 * 16 * 8 * 9,
    ),
    "mkldnn puts padding before stride": Case(
        lambda: F.conv2d(plain(4, 16, 8, 8), plain(32, 16, 3, 3), stride=2, padding=0),
        "aten::mkldnn_convolution",
        "conv",
        FP32 * (4 * 16 * 64 + 32 * 16 * 9),
        FP32 * 4 * 32 * 3 * 3,
        flops=2 * 4 * 32 * 9 * 16 * 9,
    ),
    "conv1d": Case(
        lambda: F.conv1d(plain(4, 16, 8), plain(32, 16, 3), dilation=2),
        "aten::conv1d",
        "conv",
        FP32 * (4 * 16 * 8 + 32 * 16 * 3),
        FP32 * 4 * 32 * 4,
        flops=2 * 4 * 32 * 4 * 16 * 3,
    ),
    "conv_transpose2d": Case(
        lambda: F.conv_transpose2d(plain(4, 16, 8, 8), plain(16, 8, 3, 3), stride=2, padding=1, output_padding=1),
        "aten::conv_transpose2d",
        "conv",
        FP32 * (4 * 16 * 64 + 16 * 8 * 9),
        FP32 * 4 * 8 * 16 * 16,
        flops=2 * 4 * 16 * 64 * 8 * 9,
    ),
    "convolution_backward": Case(
        lambda: backward(F.conv2d(leaf(4, 16, 8, 8), leaf(32, 16, 3, 3), leaf(32), padding=1)),
        "aten::convolution_backward",
        "conv",
        FP32 * (4 * 32 * 64 + 32 * 16 * 9 + 4 * 16 * 64),
        FP32 * (4 * 16 * 64 + 32 * 16 * 9 + 32),
        flops=2 * 2 * 4 * 32 * 64 * 16 * 9,
    ),
    "convolution_backward of the weight alone": Case(
        lambda: backward(F.conv2d(plain(4, 16, 8, 8), leaf(32, 16, 3, 3), padding=1)),
        "aten::convolution_backward",
        "conv",
        FP32 * (4 * 32 * 64 + 4 * 16 * 64),
        FP32 * 32 * 16 * 9,
        flops=2 * 4 * 32 * 64 * 16 * 9,
    ),
    # attention: 2 · pairs · (head size of keys + of values)
    "attention": Case(
        lambda: attend(plain(2, 4, 32, 16), plain(2, 4, 24, 16)),
        "aten::scaled_dot_product_attention",
        "attention",
        FP32 * 2 * 4 * 16 * (32 + 2 * 24),
        FP32 * 2 * 4 * 32 * 16,
        flops=2 * 2 * 4 * 32 * 24 * 32,
        limit="matmul_fp32",
    ),
    "causal attention": Case(
        lambda: attend(plain(2, 4, 32, 16), plain(2, 4, 32, 16), is_causal=True),
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "attention",
        FP32 * 2 * 4 * 16 * 3 * 32,
        FP32 * 2 * 4 * 32 * 16,
        flops=2 * 2 * 4 * (32 * 33 // 2) * 32,
    ),
    "attention with few heads of keys": Case(
        lambda: attend(plain(2, 8, 32, 16), plain(2, 2, 32, 16), enable_gqa=True),
        "aten::scaled_dot_product_attention",
        "attention",
        FP32 * 2 * 32 * 16 * (8 + 2 + 2),
        FP32 * 2 * 8 * 32 * 16,
        flops=2 * 2 * 8 * 32 * 32 * 32,
    ),
    "attention's backward": Case(
        lambda: backward(attend(leaf(2, 4, 32, 16), leaf(2, 4, 32, 16))),
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "attention",
        FP32 * (5 * 2 * 4 * 32 * 16 + 2 * 4 * 32),  # dy, q, k, v, y, and a number a row
        FP32 * 3 * 2 * 4 * 32 * 16,
        flops=2.5 * 2 * 2 * 4 * 32 * 32 * 32,
    ),
    # norms and softmax
    "layer_norm": Case(
        lambda: F.layer_norm(plain(4, 16), (16,), plain(16), plain(16)),
        "aten::native_layer_norm",
        "norm",
        FP32 * (64 + 32),
        FP32 * 64,
        flops=7 * 64,
        limit="vector_fp32",
    ),
    "layer_norm's backward": Case(
        lambda: backward(F.layer_norm(leaf(4, 16), (16,), leaf(16), leaf(16))),
        "aten::native_layer_norm_backward",
        "norm",
        FP32 * (2 * 64 + 16),
        FP32 * (64 + 32),
        flops=12 * 64,
    ),
    "rms_norm": Case(
        lambda: F.rms_norm(plain(4, 16), (16,), plain(16)),
        "aten::rms_norm",
        "norm",
        FP32 * (64 + 16),
        FP32 * 64,
        flops=4 * 64,
    ),
    "batch_norm": Case(
        lambda: F.batch_norm(plain(4, 16, 8, 8), plain(16), plain(16), plain(16), plain(16), training=True),
        "aten::native_batch_norm",
        "norm",
        FP32 * (4096 + 32),
        FP32 * 4096,
    ),
    "batch_norm's backward": Case(
        lambda: backward(F.batch_norm(leaf(4, 16, 8, 8), None, None, leaf(16), leaf(16), training=True)),
        "aten::native_batch_norm_backward",
        "norm",
        FP32 * (2 * 4096 + 16),
        FP32 * (4096 + 16),
    ),
    "group_norm": Case(
        lambda: F.group_norm(plain(4, 16, 8, 8), 4, plain(16), plain(16)),
        "aten::native_group_norm",
        "norm",
        FP32 * (4096 + 32),
        FP32 * 4096,
    ),
    "group_norm's backward": Case(
        lambda: backward(F.group_norm(leaf(4, 16, 8, 8), 4, leaf(16), leaf(16))),
        "aten::native_group_norm_backward",
        "norm",
        FP32 * (2 * 4096 + 16),
        FP32 * (4096 + 16),
    ),
    "softmax": Case(
        lambda: F.softmax(plain(4, 16), -1), "aten::_softmax", "softmax", FP32 * 64, FP32 * 64, flops=5 * 64
    ),
    "softmax's backward": Case(
        lambda: backward(F.softmax(leaf(4, 16), -1)),
        "aten::_softmax_backward_data",
        "softmax",
        FP32 * 128,
        FP32 * 64,
        flops=4 * 64,
    ),
    "log_softmax into float64": Case(
        lambda: F.log_softmax(plain(4, 16), -1, dtype=torch.float64), "aten::log_softmax", "softmax", FP32 * 64, 8 * 64
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
    assert unknown <= {"aten::arange"}
