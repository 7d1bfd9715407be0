"""A model whose weights stay in host memory brings each layer's weight to the GPU when its turn comes.

Cause: the copies are pinned and asynchronous, but go into the stream that computes, so that each layer waits for its
weight and the link idles while it computes. `sublight explain`: exposed-copy.
Fix: a stream of its own copies the next layer's weight while this layer computes.
"""

import argparse
import itertools
import statistics
import time

import torch
from torch import nn


class Offloaded(nn.Module):
    def __init__(self, weights, device, prefetch):
        super().__init__()
        self.weights, self.prefetch = weights, prefetch
        self.buffers_on_device = [torch.empty_like(weights[0], device=device) for _ in range(2)]
        self.side = torch.cuda.Stream()
        if prefetch:
            self.bring(0)

    def bring(self, layer):
        """Copy a weight into the buffer that is not being read."""
        self.buffers_on_device[layer % 2].copy_(self.weights[layer], non_blocking=True)

    def forward(self, x):
        main = torch.cuda.current_stream()
        for layer in range(len(self.weights)):  # an even number: layer 0 of the next call follows the last one
            if self.prefetch:
                main.wait_stream(self.side)  # wait until this layer's weight has arrived
                self.side.wait_stream(main)  # wait until no kernel reads the other buffer any more
                with torch.cuda.stream(self.side):
                    self.bring((layer + 1) % len(self.weights))
            else:
                self.bring(layer)
            x = x @ self.buffers_on_device[layer % 2]
        return x


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="copy the next weight while this layer computes")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.device == "cpu":
        parser.exit(2, "exposed_copy.py: needs a GPU: a CPU copies nothing to itself\n")
    torch.manual_seed(0)
    rows, width, layers = 16384, 8192, 4
    on_device = (torch.randn(width, width, device=args.device, dtype=torch.bfloat16) for _ in range(layers))
    weights = [(weight / width**0.5).cpu().pin_memory() for weight in on_device]
    model = Offloaded(weights, args.device, prefetch=args.fixed)
    x = torch.randn(rows, width, device=args.device, dtype=torch.bfloat16)
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
