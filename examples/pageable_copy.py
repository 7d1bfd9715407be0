"""Training takes 200 MB batches from ordinary (pageable) memory and copies each when its step begins.

Cause: the driver copies pageable memory through a small buffer of its own, at less than half the link's speed, and
`.to(device)` waits for the end: the GPU idles meanwhile. `sublight explain`: pageable-copy.
Fix: pinned memory, `non_blocking=True`, and the next batch copied on a stream of its own while this one trains.
"""

import argparse
import itertools
import statistics
import time

import torch
from torch import nn


def copied_when_needed(batches, device):
    for batch in batches:
        yield batch.to(device)


def copied_ahead(batches, device):
    """Each batch is on its way while the one before it is trained on."""
    side, ready = torch.cuda.Stream(), None
    for batch in itertools.chain(batches, [None]):
        torch.cuda.current_stream().wait_stream(side)
        current = ready
        if batch is not None:
            with torch.cuda.stream(side):
                ready = batch.to(device, non_blocking=True)
        if current is not None:
            current.record_stream(torch.cuda.current_stream())  # its memory is free once this stream is past it
            yield current


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="pin the memory and copy the next batch meanwhile")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.device == "cpu":
        parser.exit(2, "pageable_copy.py: needs a GPU: a CPU copies nothing to itself\n")
    torch.manual_seed(0)
    rows, features, width = 8192, 6144, 4096
    data = [torch.randn(rows, features, device=args.device).cpu() for _ in range(3)]
    if args.fixed:
        data = [batch.pin_memory() for batch in data]
    blocks = [module for _ in range(4) for module in (nn.Linear(width, width), nn.ReLU(inplace=True))]
    model = nn.Sequential(nn.Linear(features, width), nn.ReLU(inplace=True), *blocks).to(args.device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    copied = copied_ahead if args.fixed else copied_when_needed
    batches = copied((data[step % 3] for step in range(args.steps)), args.device)
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step in range(1, args.steps + 1):
        x = next(batches).bfloat16()
        loss = model(x).square().sum(1).mean()
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
