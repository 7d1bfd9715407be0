"""A policy network of 128 small layers is called for a few observations at a time.

Cause: each of its 512 kernels takes about 2 µs, and the host needs about 9 µs to launch one: the GPU waits for it.
`sublight explain`: launch-bound. Fix: record the kernels once in a CUDA graph and replay it, one launch for all.
"""

import argparse
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


class Policy(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return x


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="replay a CUDA graph")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.device == "cpu":
        parser.exit(2, "launch_bound.py: needs a GPU: a CPU has no launches to wait for\n")
    torch.manual_seed(0)
    batch, width = 8, 512
    model = Policy(width, layers=128).to(args.device, torch.bfloat16).eval()
    observations = torch.randn(16, batch, width, device=args.device, dtype=torch.bfloat16)
    if args.fixed:
        model = torch.cuda.make_graphed_callables(model, (observations[0].clone(),))
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step in range(1, args.steps + 1):
        action = model(observations[step % 16])
        if step % chunk == 0:  # wait once in a chunk of steps, never in each
            torch.get_device_module(args.device).synchronize()
            marks.append(time.perf_counter())
    times = [after - before for before, after in itertools.pairwise(marks)]
    print(f"checksum: {action.float().abs().mean().item():.6f}")
    print(f"step: {1e3 * statistics.median(times[len(times) // 2 :]) / chunk:.2f} ms")


if __name__ == "__main__":
    main()
