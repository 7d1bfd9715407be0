"""A vision transformer in float32, TF32 allowed, whose attention is written out."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def split(self, x):
        batch, length, width = x.shape
        return x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        weights = F.softmax(scores, dim=-1)
        return self.out(torch.matmul(weights, v).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, width // 64)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    batch, length, width, layers = (16, 1024, 768, 8) if args.device == "cuda" else (1, 64, 64, 1)
    model = nn.Sequential(*(Block(width) for _ in range(layers)), nn.LayerNorm(width)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    patches = torch.randn(2, batch, length, width, device=args.device)
    for step in range(args.steps):
        x = patches[step % 2]
        loss = F.mse_loss(model(x), x.flip(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss: {loss.item():.5f}")


if __name__ == "__main__":
    main()
