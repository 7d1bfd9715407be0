"""What few bits cost in accuracy: a small character model is trained, packed in each way, and its perplexity compared.

    python benchmarks/low_bit_accuracy.py TEXT --json low_bit_accuracy.json

TEXT is any text of a megabyte or so; tinyshakespeare is a usual one. On a GPU a minute is enough; a CPU needs ten.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sublight import units
from sublight.fix.quantize.model import quantize, unquantize

WIDTH, HEADS, LAYERS, TOKENS, BATCH = 256, 4, 4, 128, 24


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(F.gelu(self.up(self.after(x))))  # type: ignore[no-any-return]


class Characters(torch.nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(vocabulary, WIDTH), torch.nn.Embedding(TOKENS, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, vocabulary, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def pieces(ids: torch.Tensor, generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    begin = torch.randint(len(ids) - TOKENS - 1, (count,), generator=generator)
    rows = torch.stack([ids[i : i + TOKENS + 1] for i in begin.tolist()])
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: torch.nn.Module, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(rows[0]).flatten(0, 1), rows[1].flatten())


def trained(ids: torch.Tensor, vocabulary: int, seconds: float) -> torch.nn.Module:
    torch.manual_seed(0)
    model, generator = Characters(vocabulary).to(ids.device), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    begin, steps = time.perf_counter(), 0
    while (passed := time.perf_counter() - begin) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (steps + 1) / 50) * (1 - 0.9 * passed / seconds)
        optimizer.zero_grad()
        loss = loss_of(model, pieces(ids, generator, BATCH))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 50 == 0:
            print(f"  step {steps}, loss {float(loss):.3f}, {seconds - passed:.0f} s left", flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(letter) for letter in text], device=options.device)
    model = trained(ids[: len(ids) * 9 // 10], len(letters), options.seconds)
    generator = torch.Generator().manual_seed(2)
    held_back = [pieces(ids[len(ids) * 9 // 10 :], generator, 32) for _ in range(16)]
    with torch.no_grad():
        whole = sum(float(loss_of(model, rows)) for rows in held_back) / len(held_back)
        print(f"as it is: loss {whole:.4f}, perplexity {math.exp(whole):.3f}")
        found: list[dict[str, Any]] = [{"how": "fp32", "loss": whole, "perplexity": math.exp(whole)}]
        for how, group, rounds in (
            ("w8a16", 128, 0), ("w4a16", 128, 0), ("w4a16", 128, 20), ("w4a16", 64, 20), ("w4a16", 32, 20),
            ("w2a16", 32, 20), ("w8a8", 0, 0), ("fp8", 0, 0),
        ):  # fmt: skip
            done = quantize(model, how, **({"group": group, "rounds": rounds} if group else {}))
            loss = sum(float(loss_of(model, rows)) for rows in held_back) / len(held_back)
            unquantize(model)
            rise = math.exp(loss - whole) - 1
            fitted = "fitted zeros" if rounds else "nearest" if group else "a scale a row"
            size = units.text(done.after_bytes, "B")
            print(f"{how} group {group:>3}, {fitted:<12} perplexity {math.exp(loss):.3f} ({rise:+.2%}), {size}")
            found.append({"how": how, "group": group, "rounds": rounds, "loss": loss, "perplexity": math.exp(loss)})
    if options.json:
        options.json.write_text(json.dumps({"letters": len(text), "seconds": options.seconds, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
