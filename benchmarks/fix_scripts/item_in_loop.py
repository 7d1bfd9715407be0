"""A convolutional net with its metrics read off at every step by .item(), its batches from pageable memory."""

import argparse

import numpy
import torch
import torch.nn.functional as F
from torch import nn


def stage(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride=2, padding=1), nn.BatchNorm2d(outside), nn.SiLU(),
        nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.SiLU(),
    )  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    widths, batch, side = ((64, 128, 256, 512), 128, 128) if args.device == "cuda" else ((8, 16), 4, 32)
    stages = [stage(inside, outside) for inside, outside in zip((3, *widths), widths, strict=False)]
    net = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 100)).to(args.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    images = numpy.random.default_rng(0).random((4, batch, 3, side, side), dtype=numpy.float32)
    labels = torch.randint(100, (4, batch))
    history = {"loss": [], "accuracy": [], "norm": []}
    for step in range(args.steps):
        x, y = torch.from_numpy(images[step % 4]).to(args.device), labels[step % 4].to(args.device)
        scores = net(x)
        loss = F.cross_entropy(scores, y)
        loss.backward()
        norm = sum(p.grad.square().sum() for p in net.parameters()).sqrt()
        optimizer.step()
        optimizer.zero_grad()
        history["loss"].append(loss.item())
        history["accuracy"].append((scores.argmax(1) == y).float().mean().item())
        history["norm"].append(norm.item())
    print(f"loss: {history['loss'][-1]:.4f}, accuracy {history['accuracy'][-1]:.3f}, norm {history['norm'][-1]:.3f}")


if __name__ == "__main__":
    main()
