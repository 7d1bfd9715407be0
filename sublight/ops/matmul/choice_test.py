"""Who takes a product: each line is a shape that a run on an H200 has decided."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.backend.device import Facts
from sublight.ops.matmul.choice import why_cublas
from sublight.ops.matmul.product import operands_of, product_of

OURS = ""


@pytest.mark.parametrize(
    ("m", "n", "k", "options", "reason"),
    [
        (1, 4096, 4096, {}, OURS),
        (1, 512, 512, {}, "one row with a weight below 2 MiB"),
        (16, 14336, 4096, {}, "16 rows with a weight below 512 MiB"),
        (16, 128256, 4096, {}, OURS),
        (4096, 4096, 4096, {}, "as fast, not faster"),
        (8192, 50257, 768, {}, OURS),  # only the result's rows are odd
        (1024, 1023, 1024, {}, OURS),
        (4096, 100_000, 700, {}, OURS),
        (128, 8192, 4095, {}, "too little work"),
        (4096, 4096, 4096, {"dtype": torch.float32}, "in 16 bits"),
        (4096, 4096, 4096, {"gpu": Facts(capability=80)}, "on Hopper alone"),
    ],
)
def test_by_shape(m: int, n: int, k: int, options: dict[str, Any], reason: str) -> None:
    dtype = options.get("dtype", torch.bfloat16)
    a, b = torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(n, k, dtype=dtype, device="meta").T
    product = product_of(a, b)
    assert product is not None
    why = why_cublas(product, operands_of(product, a, b), dtype, options.get("gpu", Facts()))
    assert why == reason if reason == OURS else reason in why


def test_few_rows_that_do_not_lie_along_k_are_cublas_own() -> None:
    a, b = torch.empty(1, 4096, dtype=torch.bfloat16), torch.empty(4096, 4096, dtype=torch.bfloat16)
    product = product_of(a, b)
    assert product is not None
    assert "do not lie along k" in why_cublas(product, operands_of(product, a, b), a.dtype, Facts())
