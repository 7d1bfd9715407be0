"""A transformer is trained in float32; TF32 is on already.

Cause: the tensor cores do bfloat16 at twice the rate of TF32, and every activation takes twice the bytes.
`sublight explain`: fp32-where-bf16-serves. Fix: run forward and loss under `torch.autocast` in bfloat16.
"""

import argparse
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // 64
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (batch, time, width)
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3 * self.heads, 64)).transpose(1, 2).chunk(3, dim=1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    batch, length, width, layers = (16, 512, 2048, 3) if args.device == "cuda" else (2, 32, 64, 2)
    model = nn.Sequential(*(Block(width) for _ in range(layers))).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(batch, length, width, device=args.device)
    y = torch.randn(batch, length, width, device=args.device)
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step in range(1, args.steps + 1):
        with torch.autocast(args.device, torch.bfloat16, enabled=args.fixed):
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
