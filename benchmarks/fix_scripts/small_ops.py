"""A recurrent world model rolled out for a few states at a time: hundreds of small ops a call, no gradients."""

import argparse

import torch
from torch import nn


class Cell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer, self.norm = (
            nn.Linear(2 * width, 2 * width),
            nn.Linear(width, width),
            nn.LayerNorm(width),
        )

    def forward(self, state, action):
        update, candidate = self.inner(torch.cat((state, action), dim=-1)).chunk(2, dim=-1)
        update, candidate = torch.sigmoid(update), torch.tanh(candidate)
        state = update * state + (1 - update) * candidate
        return self.norm(state + torch.relu(self.outer(state)))


class World(nn.Module):
    """The next states, so many steps ahead."""

    def __init__(self, width, ahead):
        super().__init__()
        self.cells, self.reward = nn.ModuleList(Cell(width) for _ in range(ahead)), nn.Linear(width, 1)

    def forward(self, state, actions):
        total = torch.zeros(state.shape[0], 1, device=state.device, dtype=state.dtype)
        for cell, action in zip(self.cells, actions, strict=True):
            state = cell(state, action)
            total = total + torch.tanh(self.reward(state))
        return total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    width, ahead, states = (256, 40, 16) if args.device == "cuda" else (32, 4, 4)
    world = World(width, ahead).to(args.device).eval()
    start = torch.randn(states, width, device=args.device)
    best = torch.tensor(-1e9, device=args.device)
    with torch.no_grad():
        for step in range(args.steps):
            generator = torch.Generator(args.device).manual_seed(step)
            actions = torch.randn(ahead, states, width, device=args.device, generator=generator)
            best = torch.maximum(best, world(start, actions).max())
    print(f"best: {best.item():.5f}")


if __name__ == "__main__":
    main()
