"""Matrix products: 2·m·n·k operations on tensor cores where the data type allows, each matrix moved once."""

from __future__ import annotations

from sublight.cost.dtypes import matmul_limit, size_bytes
from sublight.cost.record import Cost, Direction, Shape, in_direction
from sublight.cost.tensor import Tensor, dense, over


def product(a: Tensor, b: Tensor, out: Tensor, k: float, *more: Tensor, limit: str = "") -> Cost:
    """Read both factors (and bias, addend, scales), write the result: k multiply-adds for each of its elements."""
    return over([a, b, *more], [out], flops={limit or matmul_limit(a.dtype): 2.0 * out.numel * k})


def linear_backward(
    x: Tensor, dy: Tensor, weight: Tensor, *, dx: bool = True, dw: bool = True, db: bool = False, limit: str = ""
) -> Cost:
    """Each gradient is a product as large as the forward one, for x of dy and the weight, for the weight of dy and x.

    The bias's is a sum over dy, which is read anyway.
    """
    bias = dense(weight.dtype, weight.shape[0])
    return over(
        [dy, *([weight] if dx else []), *([x] if dw else [])],
        [*([x] if dx else []), *([weight] if dw else []), *([bias] if db else [])],
        flops={limit or matmul_limit(x.dtype): 2.0 * dy.numel * weight.shape[1] * (dx + dw)},
    )


def matmul(shape: Shape, dtype: str, direction: Direction, out_dtype: str = "") -> Cost:
    m, n, k = shape["m"], shape["n"], shape["k"]
    a, b, out = dense(dtype, m, k), dense(dtype, n, k), dense(out_dtype or dtype, m, n)
    # read a and b, write out; backward two products: da of dy and b, db of dy and a
    return in_direction(direction, product(a, b, out, k), linear_backward(a, out, b))


def linear(shape: Shape, dtype: str, direction: Direction, bias: bool = True) -> Cost:
    m, n, k = shape["m"], shape["n"], shape["k"]
    x, weight, y = dense(dtype, m, k), dense(dtype, n, k), dense(dtype, m, n)
    more = [dense(dtype, n)] if bias else []
    return in_direction(direction, product(x, weight, y, k, *more), linear_backward(x, y, weight, db=bias))


def batched_matmul(shape: Shape, dtype: str, direction: Direction) -> Cost:
    batch, m, n, k = shape["batch"], shape["m"], shape["n"], shape["k"]
    a, b, out = dense(dtype, batch, m, k), dense(dtype, batch, k, n), dense(dtype, batch, m, n)
    # read a and b, write out; backward two products: da of dy and b, db of dy and a
    backward = over([out, a, b], [a, b], flops={matmul_limit(dtype): 4.0 * out.numel * k})
    return in_direction(direction, product(a, b, out, k), backward)


def low_bit_matmul(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """Weights of `bits` with a 16-bit scale for each `group` of k, made whole on chip: a product in x's data type."""
    m, n, k = shape["m"], shape["n"], shape["k"]
    x, y = dense(dtype, m, k), dense(dtype, m, n)
    weight_bytes = -(-n * k * shape["bits"] // 8)
    scales_bytes = size_bytes(n * -(-k // shape["group"]), "float16")
    # read x, the packed weight and its scales, write y
    return Cost(
        read_bytes=x.bytes + weight_bytes + scales_bytes,
        write_bytes=y.bytes,
        flops={matmul_limit(dtype): 2.0 * m * n * k},
    )


def rms_norm_linear(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """One row, normed on its way into a product; a gated weight has two rows for each result."""
    n, k = shape["n"], shape["k"]
    x, weight, y = dense(dtype, 1, k), dense(dtype, n * (2 if shape.get("gated") else 1), k), dense(dtype, 1, n)
    # read x, the norm's weight and the product's, write y
    return over([x, dense(dtype, k), weight], [y], flops={matmul_limit(dtype): 2.0 * weight.numel})


def row_linear(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """One row by a packed weight, normed on its way; a gated weight has two rows for each result."""
    n, k = shape["n"], shape["k"]
    rows = n * (2 if shape.get("gated") else 1)
    x, y = dense(dtype, 1, k), dense(dtype, 1, n)
    weight_bytes = -(-rows * k * shape["bits"] // 8)
    scales_bytes = 2 * size_bytes(rows * -(-k // shape["group"]), dtype)  # and zeros
    # read x, the norm's weight, the packed one, its scales and zeros, write y
    return Cost(
        read_bytes=x.bytes + dense(dtype, k).bytes + weight_bytes + scales_bytes,
        write_bytes=y.bytes,
        flops={matmul_limit(dtype): 2.0 * rows * k},
    )


def scaled_matmul(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """8-bit codes with scales in fp32: one of each row and column, or of each `block` of k in them; out in 16 bits."""
    m, n, k, block = shape["m"], shape["n"], shape["k"], shape["block"]
    pieces = -(-k // block) if block else 1
    scales = dense("float32", (m + n) * pieces)
    # read a, b and their scales, write c
    return product(dense(dtype, m, k), dense(dtype, n, k), dense("bfloat16", m, n), k, scales)


def grouped_matmul(shape: Shape, dtype: str, direction: Direction) -> Cost:
    """Rows sorted by expert, each expert's with a matrix of its own: (m, k) @ (groups, k, n)."""
    m, n, k, groups = shape["m"], shape["n"], shape["k"], shape["groups"]
    x, y = dense(dtype, m, k), dense(dtype, m, n)
    return product(x, dense(dtype, min(groups, m), k, n), y, k)  # read x and the matrices that rows go to, write y
