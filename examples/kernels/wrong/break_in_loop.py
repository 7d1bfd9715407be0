"""The compiler knows no `break`; the interpreter is Python and does. A helper has it."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _first_power_of_two(n):
    power = 1
    for _ in range(31):
        if power >= n:
            break  # planted: does-not-compile
        power *= 2
    return power


@triton.jit
def _power_kernel(x_ptr, y_ptr):
    i = tl.program_id(0)
    tl.store(y_ptr + i, _first_power_of_two(tl.load(x_ptr + i)))


def main() -> None:
    x = torch.tensor([1, 3, 17, 64], dtype=torch.int32)
    y = torch.empty_like(x)
    _power_kernel[(4,)](x, y)
    assert y.tolist() == [1, 4, 32, 64]


if __name__ == "__main__":
    main()
