"""A stack of perceptrons hands its activations on in float32 and channels-first; each block works otherwise.

Cause: every block copies the whole activation into its own layout, type and memory, and copies its result back, only
for the next block to undo it. `sublight explain`: redundant-cast-or-copy.
Fix: one layout and one type throughout.
"""

import argparse
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, lean):
        super().__init__()
        self.up, self.down, self.lean = nn.Linear(width, width), nn.Linear(width, width), lean

    def forward(self, x):
        if self.lean:
            return self.down(F.relu(self.up(x)))  # (batch, time, width) in and out
        x = x.transpose(1, 2).contiguous()  # (batch, width, time) to (batch, time, width)
        x = x.clone().to(self.up.weight.dtype)  # the caller's tensor must stay as it is
        h = self.down(F.relu(self.up(x))).float()
        return h.transpose(1, 2).contiguous()


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="one layout, no copies")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    batch, length, width, layers = (32, 2048, 1024, 10) if on_gpu else (16, 8192, 64, 1)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = nn.Sequential(*(Block(width, args.fixed) for _ in range(layers))).to(args.device, dtype)
    x = torch.randn(batch, length, width, device=args.device, dtype=dtype)
    if not args.fixed:
        x = x.float().transpose(1, 2).contiguous()
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
