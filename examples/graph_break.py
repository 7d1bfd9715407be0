"""A compiled model checks its activations between any two operations, in Python that the compiler must not follow.

Cause: the graph breaks at each such call: what would be fused into one kernel becomes four, with Python between them,
and each reads and writes a big tensor. `sublight explain`: graph-break.
Fix: no such calls in the compiled forward; `torch.compile(model, fullgraph=True)` says where they are.
"""

import argparse
import itertools
import statistics
import time

import torch
from torch import nn


@torch.compiler.disable
def check(h, x):
    if h.shape != x.shape:
        raise ValueError(f"shape {tuple(h.shape)}, expected {tuple(x.shape)}")


class Gated(nn.Module):
    def __init__(self, width, check):
        super().__init__()
        self.linear, self.check = nn.Linear(width, width), check
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        h = self.linear(x)
        self.check(h, x)
        h = h * self.scale + self.shift
        self.check(h, x)
        gate = torch.sigmoid(h)
        self.check(gate, x)
        h = gate * torch.tanh(h)
        self.check(h, x)
        return x + h


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="check nothing in the compiled forward")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    rows, width, layers = (65536, 2048, 6) if on_gpu else (1024, 64, 2)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    checked = (lambda h, x: None) if args.fixed else check
    model = nn.Sequential(*(Gated(width, checked) for _ in range(layers))).to(args.device, dtype)
    compiled = torch.compile(model)
    x = torch.randn(rows, width, device=args.device, dtype=dtype)
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step in range(1, args.steps + 1):
        y = compiled(x)
        if step % chunk == 0:  # wait once in a chunk of steps, never in each
            torch.get_device_module(args.device).synchronize()
            marks.append(time.perf_counter())
    times = [after - before for before, after in itertools.pairwise(marks)]
    print(f"checksum: {y.float().abs().mean().item():.6f}")
    print(f"step: {1e3 * statistics.median(times[len(times) // 2 :]) / chunk:.2f} ms")


if __name__ == "__main__":
    main()
