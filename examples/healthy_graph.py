"""A transformer in bfloat16, its blocks compiled, the whole of it replayed from a CUDA graph: nothing to gain.

`sublight explain`: healthy. Kernels follow one another without the host, pointwise work is fused, attention is flash.
"""

import argparse
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

HEAD = 128


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads = width // HEAD
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (batch, time, width)
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3 * self.heads, HEAD)).transpose(1, 2).chunk(3, dim=1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.device == "cpu":
        parser.exit(2, "healthy_graph.py: needs a GPU: a CPU has no CUDA graphs\n")
    torch.manual_seed(0)
    batch, length, width, layers = 8, 1024, 2048, 8
    model = nn.Sequential(*(Block(width) for _ in range(layers))).to(args.device, torch.bfloat16).eval()
    for block in model:
        block.compile()  # the blocks are alike: one compilation serves all
    data = torch.randn(4, batch, length, width, device=args.device, dtype=torch.bfloat16)
    model = torch.cuda.make_graphed_callables(model, (data[0].clone(),))
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step in range(1, args.steps + 1):
        y = model(data[step % 4])
        if step % chunk == 0:  # wait once in a chunk of steps, never in each
            torch.get_device_module(args.device).synchronize()
            marks.append(time.perf_counter())
    times = [after - before for before, after in itertools.pairwise(marks)]
    print(f"checksum: {y.float().abs().mean().item():.6f}")
    print(f"step: {1e3 * statistics.median(times[len(times) // 2 :]) / chunk:.2f} ms")


if __name__ == "__main__":
    main()
