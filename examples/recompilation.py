"""A compiled model is called with sequences of a length that differs at every step.

Cause: `dynamic=False` compiles for one shape, so each new length compiles the model again, in the middle of the run.
`sublight explain`: recompilation. Fix: `dynamic=True`, one compilation for all lengths; or pad to a few lengths.
(The backend is aot_eager so that a compilation takes a tenth of a second; the default one takes seconds.)
"""

import argparse
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn


class Mixer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):  # (batch, time, width)
        return (x + self.down(F.gelu(self.up(x)))).mean(dim=1)


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="compile once for all lengths")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    batch, length, width = (32, 2048, 2048) if on_gpu else (8, 512, 128)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch._dynamo.config.recompile_limit = 1000  # as one does who meets "recompile_limit reached"
    model = torch.compile(Mixer(width).to(args.device, dtype), backend="aot_eager", dynamic=args.fixed)
    data = torch.randn(batch, length, width, device=args.device, dtype=dtype)
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step in range(1, args.steps + 1):
        pooled = model(data[:, : length // 2 + step])
        if step % chunk == 0:  # wait once in a chunk of steps, never in each
            torch.get_device_module(args.device).synchronize()
            marks.append(time.perf_counter())
    times = [after - before for before, after in itertools.pairwise(marks)]
    print(f"checksum: {pooled.float().abs().mean().item():.6f}")
    print(f"step: {1e3 * statistics.median(times[len(times) // 2 :]) / chunk:.2f} ms")


if __name__ == "__main__":
    main()
