"""Training logs the norm of every weight and of its gradient, and asks for each number at once.

Cause: `.item()` waits until the GPU has done all it was given, so the queue is empty 97 times a step and the GPU idles
until the host has launched the next kernel. `sublight explain`: host-sync.
Fix: keep the numbers on the GPU and read them once in 50 steps.
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
    parser.add_argument("--fixed", action="store_true", help="read the norms once in 50 steps")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    rows, width, layers = (16384, 1024, 24) if on_gpu else (256, 64, 4)
    dtype = torch.bfloat16 if on_gpu else torch.float32

    blocks = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*blocks).to(args.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(rows, width, device=args.device, dtype=dtype)
    y = torch.randn(rows, width, device=args.device, dtype=dtype)

    logged = []
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step in range(1, args.steps + 1):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        numbers = [loss.detach()]
        for weight in model.parameters():
            for tensor in (weight.detach(), weight.grad):
                norm = tensor.norm()
                numbers.append(norm if args.fixed else norm.item())
        if not args.fixed:
            logged.append([loss.item(), *numbers[1:]])
        elif step % 50 == 0:
            logged.append(torch.stack(numbers).tolist())
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
