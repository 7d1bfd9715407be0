"""A residual network over tables of numbers in float32, as PyTorch is set: features are standardised in the loop, the
error is a Huber loss written out, and targets drift from batch to batch.
"""

import argparse

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.outer(torch.relu(self.inner(self.norm(x))))


def huber(error, delta=1.0):
    size = error.abs()
    return torch.where(size < delta, 0.5 * error * error, delta * (size - 0.5 * delta)).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    features, width, layers, rows = (300, 1536, 6, 8192) if args.device == "cuda" else (30, 32, 2, 64)
    blocks = (Residual(width) for _ in range(layers))
    model = nn.Sequential(nn.Linear(features, width), *blocks, nn.LayerNorm(width), nn.Linear(width, 8)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    table = torch.randn(4, rows, features, device=args.device) * 3 + 1
    truth = torch.randn(features, 8, device=args.device) / features**0.5
    for step in range(args.steps):
        x = table[step % 4]
        x = (x - x.mean(0)) / (x.std(0) + 1e-5)
        loss = huber(model(x) - torch.sin(x @ truth + 0.01 * step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss: {loss.item():.5f}")


if __name__ == "__main__":
    main()
