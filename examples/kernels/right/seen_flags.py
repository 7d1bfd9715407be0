"""Many programs raise the same flags: harmless, and said as information."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _mark_kernel(ids_ptr, seen_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids_ptr + offsets, mask=offsets < n, other=0)
    tl.store(seen_ptr + id, 1, mask=offsets < n)  # information: race


def main() -> None:
    ids = torch.arange(300) % 20
    seen = torch.zeros(20, dtype=torch.int8)
    _mark_kernel[(3,)](ids, seen, 300, BLOCK=128)
    assert seen.all()


if __name__ == "__main__":
    main()
