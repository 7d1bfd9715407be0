"""A residual network is trained with a layer normalisation written by hand.

Cause: mean, variance, scale and shift are operators of their own, and each passes over the whole activation, forward
and backward. `sublight explain`: unfused-norm. Fix: `F.layer_norm`, one pass each way.
"""

import argparse
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, width, fused):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.fused = fused

    def forward(self, x):
        if self.fused:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias)
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        return centred * torch.rsqrt(variance + 1e-5) * self.weight + self.bias


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="use F.layer_norm")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    rows, width, layers = (65536, 1024, 6) if on_gpu else (131072, 64, 1)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    blocks = [module for _ in range(layers) for module in (Norm(width, args.fixed), nn.Linear(width, width))]
    model = nn.Sequential(*blocks).to(args.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
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
