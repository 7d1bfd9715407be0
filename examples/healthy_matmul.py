"""Large matrix products in bfloat16, one after the other: nothing to gain.

`sublight explain`: healthy. The tensor cores are busy all the time, near the rate that they reach.
"""

import argparse
import itertools
import statistics
import time

import torch
from torch import nn


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    rows, width, layers = (8192, 8192, 8) if on_gpu else (1024, 2048, 3)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(args.device, dtype)
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
