"""Self-attention as the formula reads: scores, softmax, weighted sum.

Cause: the scores of every query against every key are written to memory and read back several times, forward and
backward. `sublight explain`: unfused-attention.
Fix: `F.scaled_dot_product_attention`, which keeps them on chip.
"""

import argparse
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

HEAD = 64


class Attention(nn.Module):
    def __init__(self, width, fused):
        super().__init__()
        self.heads, self.fused = width // HEAD, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):  # (batch, time, width)
        q, k, v = self.qkv(x).unflatten(-1, (3 * self.heads, HEAD)).transpose(1, 2).chunk(3, dim=1)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(-2, -1) / HEAD**0.5  # (batch, head, time, time)
            mixed = scores.softmax(dim=-1) @ v
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="use scaled_dot_product_attention")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    batch, length, width, layers = (4, 2048, 1024, 6) if on_gpu else (1, 3072, 64, 1)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = nn.Sequential(*(Attention(width, args.fixed) for _ in range(layers))).to(args.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(batch, length, width, device=args.device, dtype=dtype)
    y = torch.randn(batch, length, width, device=args.device, dtype=dtype)
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
