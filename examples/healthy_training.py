"""A transformer is trained as it should be: nothing to gain.

`sublight explain`: healthy. Compiled blocks in bfloat16, flash attention, a fused optimizer, big batches, and a loader
whose workers have the next batches ready in pinned memory. (On a CPU: float32, no compiler, no workers.)
"""

import argparse
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    batch, length, width, layers, words = (16, 1024, 2048, 4, 8192) if on_gpu else (8, 64, 256, 2, 512)
    blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
    model = nn.Sequential(nn.Embedding(words, width), blocks, nn.LayerNorm(width), nn.Linear(width, words))
    model.to(args.device, torch.bfloat16 if on_gpu else torch.float32)
    if on_gpu:
        for block in blocks:
            block.compile()  # the blocks are alike: one compilation serves all
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(words, (args.steps * batch, length + 1))
    workers = {"num_workers": 2, "prefetch_factor": 4, "pin_memory": True} if on_gpu else {}
    batches = iter(DataLoader(tokens, batch, **workers))
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step in range(1, args.steps + 1):
        text = next(batches).to(args.device, non_blocking=True)
        loss = F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
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
