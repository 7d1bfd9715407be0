"""A server scores the beams of 256 requests, one request after the other.

Cause: the log-softmax of one request has four rows, which are four blocks on a GPU of more than a hundred
multiprocessors: the kernel is long and most of the GPU idles in it. `sublight explain`: small-grid.
Fix: one call over all requests.
"""

import argparse
import itertools
import statistics
import time

import torch
from torch import nn


class Scorer(nn.Module):
    def __init__(self, width, vocabulary, together):
        super().__init__()
        self.head, self.together = nn.Linear(width, vocabulary, bias=False), together

    def best(self, logits):
        return torch.log_softmax(logits, dim=-1, dtype=torch.float32).amax(dim=-1)

    def forward(self, hidden):  # (request, beam, width)
        logits = self.head(hidden)
        if self.together:
            return self.best(logits)
        return torch.stack([self.best(request) for request in logits])


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="score all requests together")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    requests, beams, width, vocabulary = (256, 4, 512, 262144) if on_gpu else (8, 4, 16, 1024)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = Scorer(width, vocabulary, args.fixed).to(args.device, dtype)
    hidden = torch.randn(requests, beams, width, device=args.device, dtype=dtype)
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step in range(1, args.steps + 1):
        scores = model(hidden)
        if step % chunk == 0:  # wait once in a chunk of steps, never in each
            torch.get_device_module(args.device).synchronize()
            marks.append(time.perf_counter())
    times = [after - before for before, after in itertools.pairwise(marks)]
    print(f"checksum: {scores.mean().item():.6f}")
    print(f"step: {1e3 * statistics.median(times[len(times) // 2 :]) / chunk:.2f} ms")


if __name__ == "__main__":
    main()
