"""A training loop gives PyTorch's cached memory back to the driver after every step, "to save memory".

Cause: `torch.cuda.empty_cache()` waits for the GPU and frees every block, and the next step asks the driver for all of
them again: cudaFree and cudaMalloc take longer than the layers they serve. `sublight explain`: allocator-thrash.
Fix: do not call it; the cache is there so that memory is asked for once.
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
    parser.add_argument("--fixed", action="store_true", help="leave the cache alone")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.device == "cpu":
        parser.exit(2, "allocator_thrash.py: needs a GPU: it is the GPU's allocator that is emptied\n")
    torch.manual_seed(0)
    rows, width, layers = 8192, 2048, 24
    blocks = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*blocks).to(args.device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(rows, width, device=args.device, dtype=torch.bfloat16)
    y = torch.randn(rows, width, device=args.device, dtype=torch.bfloat16)
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step in range(1, args.steps + 1):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not args.fixed:
            torch.cuda.empty_cache()
        if step % chunk == 0:  # wait once in a chunk of steps, never in each
            torch.get_device_module(args.device).synchronize()
            marks.append(time.perf_counter())
    times = [after - before for before, after in itertools.pairwise(marks)]
    print(f"loss: {loss.item():.6f}")
    print(f"step: {1e3 * statistics.median(times[len(times) // 2 :]) / chunk:.2f} ms")


if __name__ == "__main__":
    main()
