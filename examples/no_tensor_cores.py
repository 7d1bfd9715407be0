"""A perceptron is trained in float32, with PyTorch's default precision of matrix products.

Cause: "highest" keeps float32 products off the tensor cores, at a seventh of their speed.
`sublight explain`: no-tensor-cores. Fix: `torch.set_float32_matmul_precision("high")`, which lets them use TF32.
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
    parser.add_argument("--fixed", action="store_true", help="let float32 products use TF32")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.fixed:
        torch.set_float32_matmul_precision("high")
    rows, width = (4096, 4096) if args.device == "cuda" else (128, 128)
    blocks = [module for _ in range(3) for module in (nn.Linear(width, width), nn.ReLU(inplace=True))]
    model = nn.Sequential(*blocks).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(rows, width, device=args.device)
    y = torch.randn(rows, width, device=args.device)
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
