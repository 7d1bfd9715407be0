"""A decoder trained as Hugging Face's loops are: an output with loss and logits, a scheduler, clipped gradients, and an
accuracy from the logits every few steps. Its norm is written out, as Llama's is.
"""

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, dim=1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, vocabulary, width, layers, heads):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks, self.norm = nn.ModuleList(Block(width, heads) for _ in range(layers)), RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return Output(loss=loss, logits=logits)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = args.device == "cuda"
    vocabulary, width, layers, batch, length = (32000, 1024, 8, 8, 1024) if on_gpu else (256, 64, 2, 2, 64)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = Decoder(vocabulary, width, layers, heads=width // 64).to(args.device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    batches = torch.randint(vocabulary, (4, batch, length), device=args.device)
    for step in range(args.steps):
        ids = batches[step % 4]
        outputs = model(input_ids=ids, labels=ids)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            accuracy = (outputs.logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean()
            print(f"step {step}: loss {outputs.loss.item():.4f}, accuracy {accuracy.item():.3f}")


if __name__ == "__main__":
    main()
