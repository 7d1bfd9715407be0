"""A token tagger is trained on packed documents, whose positions start anew after each end-of-document token.

Cause: positions are counted in Python, token by token, before each forward: the device waits for a loop that no torch
op explains. `sublight explain`: host-bound. Fix: count them with tensor ops, on the device.
"""

import argparse
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

END = 0  # the token between two documents


def count_in_python(tokens):
    positions = []
    for row in tokens.tolist():
        position = 0
        for token in row:
            positions.append(position)
            position = 0 if token == END else position + 1
    return torch.tensor(positions, pin_memory=tokens.is_pinned()).view(tokens.shape)


def count_on_device(tokens):
    starts = F.pad(tokens[:, :-1] == END, (1, 0))  # a document starts after an end
    here = torch.arange(tokens.shape[1], device=tokens.device)
    return here - torch.where(starts, here, 0).cummax(dim=1).values


class Tagger(nn.Module):
    def __init__(self, length, width, layers):
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width).requires_grad_(False)
        blocks = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU(inplace=True))]
        self.rest = nn.Sequential(*blocks, nn.Linear(width, 1))

    def forward(self, tokens, positions):
        return self.rest(self.token(tokens) + self.position(positions))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fixed", action="store_true", help="count positions with tensor ops")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    batch, length, width, layers = (96, 2048, 1024, 4) if on_gpu else (64, 2048, 8, 1)
    model = Tagger(length, width, layers).to(args.device, torch.bfloat16 if on_gpu else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    data = [torch.randint(256, (batch, length), pin_memory=on_gpu) for _ in range(4)]
    chunk, marks = max(1, args.steps // 12), [time.perf_counter()]
    for step in range(1, args.steps + 1):
        tokens = data[step % 4].to(args.device, non_blocking=True)
        positions = count_on_device(tokens) if args.fixed else count_in_python(data[step % 4])
        positions = positions.to(args.device, non_blocking=True)
        logits = model(tokens, positions).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(logits, (tokens % 2).to(logits.dtype))
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
