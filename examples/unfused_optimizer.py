"""A deep network of 200 parameters is trained by AdamW, one parameter after the other.

Cause: `foreach=False` launches a dozen small kernels for each parameter, 2,400 a step, and the GPU waits for their
launches. `sublight explain`: unfused-optimizer. Fix: `fused=True`, which updates all of them in a few kernels.
"""

import argparse
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="use the fused optimizer")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    rows, width, layers = (12288, 1024, 100) if on_gpu else (64, 64, 8)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    blocks = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU(inplace=True))]
    model = nn.Sequential(*blocks).to(args.device, dtype)
    fused = {"fused": True} if args.fixed else {"foreach": False}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **fused)
    x = torch.randn(rows, width, device=args.device, dtype=dtype)
    y = torch.randn(rows, width, device=args.device, dtype=dtype)
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step in range(1, args.steps + 1):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % chunk == 0:  # wait once in a chunk of steps, never in each
            torch.get_device_module(args.device).synchronize()
            marks.append(time.perf_counter())
    times = [after - before for before, after in itertools.pairwise(marks)]
    print(f"loss: {loss.item():.6f}")
    print(f"step: {1e3 * statistics.median(times[len(times) // 2 :]) / chunk:.2f} ms")


if __name__ == "__main__":
    main()
