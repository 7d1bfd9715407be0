"""A residual network writes out the tanh approximation of GELU itself.

Cause: each of its eight operators reads a big tensor from memory and writes one back, for a few operations an element.
`sublight explain`: unfused-pointwise. Fix: `F.gelu(h, approximate="tanh")`, which reads once and writes once;
`torch.compile` makes one kernel of any such chain.
"""

import argparse
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, fused):
        super().__init__()
        self.linear, self.fused = nn.Linear(width, width), fused

    def forward(self, x):
        h = self.linear(x)
        if self.fused:
            return x + F.gelu(h, approximate="tanh")
        return x + 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * h**3)))


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="use the built-in GELU")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    rows, width, layers = (32768, 2048, 12) if on_gpu else (131072, 64, 1)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = nn.Sequential(*(Block(width, args.fixed) for _ in range(layers))).to(args.device, dtype)
    x = torch.randn(rows, width, device=args.device, dtype=dtype)
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step in range(1, args.steps + 1):
        y = model(x)
        if step % chunk == 0:  # wait once in a chunk of steps, never in each
            torch.get_device_module(args.device).synchronize()
            marks.append(time.perf_counter())
    times = [after - before for before, after in itertools.pairwise(marks)]
    print(f"checksum: {y.float().abs().mean().item():.6f}")
    print(f"step: {1e3 * statistics.median(times[len(times) // 2 :]) / chunk:.2f} ms")


if __name__ == "__main__":
    main()
