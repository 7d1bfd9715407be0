"""Launches from several threads, on streams, with a generator of the GPU's."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import threading

import torch
import triton
import triton.language as tl


@triton.jit
def _halve_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) / 2, mask=mask)


def work() -> None:
    generator = torch.Generator(device="cuda").manual_seed(1)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.randn(300, device="cuda", generator=generator)
        y = torch.empty_like(x)
        _halve_kernel[(3,)](x, y, 300, BLOCK=128)
    torch.cuda.current_stream().wait_stream(stream)
    assert x.is_cuda and y.get_device() == 0 and torch.equal(y, x / 2)


def main() -> None:
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
