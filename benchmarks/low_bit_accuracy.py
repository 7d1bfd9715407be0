"""What few bits cost in accuracy: a small character model is trained, packed in each way, and its perplexity compared.

    python benchmarks/low_bit_accuracy.py --json low_bit_accuracy.json            on a GPU, within a minute
    python benchmarks/low_bit_accuracy.py tinyshakespeare.txt --seconds 600       any text of a megabyte or so; a CPU

Without a text it reads the sources of Python's standard library, which are everywhere. The model computes in bfloat16
on a GPU, where our products of packed weights run, and in float32 on a CPU. Each perplexity is held against the model's
own in the same data type.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sublight import units
from sublight.fix.quantize.model import quantize, unquantize

HEADS, TOKENS = 4, 128
BATCH = {"cuda": 128, "cpu": 24}
MOST_LETTERS = 4_000_000
HELD_BACK = 8  # batches of 32 pieces that are never trained on
BARS = {("w8a16", 128): 0.01, ("w4a16", 128): 0.03}  # by how much the perplexity may rise


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.after(x))))  # type: ignore[no-any-return]


class Characters(torch.nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(TOKENS, width)
        self.blocks = torch.nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, vocabulary, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def standard_library() -> str:
    """The sources of Python's standard library, in their order."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)[:MOST_LETTERS]


def numbered(text: str, device: str) -> tuple[torch.Tensor, int]:
    """The text as numbers of its 95 most common letters, all others as one; how many there are, made a multiple of 16
    as models do, since products of 8 bits ask for that."""
    letters = [letter for letter, _ in Counter(text).most_common(95)]
    number = {letter: i for i, letter in enumerate(letters)}
    ids = torch.tensor([number.get(letter, len(letters)) for letter in text], device=device)
    return ids, -(-(len(letters) + 1) // 16) * 16


def pieces(ids: torch.Tensor, generator: torch.Generator, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    begin = torch.randint(len(ids) - TOKENS - 1, (count, 1), generator=generator)
    rows = ids[(begin + torch.arange(TOKENS + 1)).to(ids.device)]
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: torch.nn.Module, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(rows[0]).float().flatten(0, 1), rows[1].flatten())


def trained(ids: torch.Tensor, model: torch.nn.Module, seconds: float) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    begin, steps, kind = time.perf_counter(), 0, ids.device.type
    while (passed := time.perf_counter() - begin) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (steps + 1) / 50) * (1 - 0.9 * passed / seconds)
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            loss = loss_of(model, pieces(ids, generator, BATCH[kind]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 200 == 0:
            print(f"  step {steps}, loss {float(loss):.3f}, {seconds - passed:.0f} s left", flush=True)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=35.0, help="of training (35)")
    parser.add_argument("--width", type=int, default=256, help="of the model, a multiple of 128 (256)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", choices=tuple(BATCH), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8") if options.text else standard_library()
    ids, vocabulary = numbered(text, options.device)
    torch.manual_seed(0)
    model: torch.nn.Module = Characters(vocabulary, options.width, options.layers).to(options.device)
    model = trained(ids[: len(ids) * 9 // 10], model, options.seconds)
    model = model.bfloat16() if options.device == "cuda" else model
    generator = torch.Generator().manual_seed(2)
    held_back = [pieces(ids[len(ids) * 9 // 10 :], generator, 32) for _ in range(HELD_BACK)]

    def loss() -> float:
        with torch.no_grad():
            return sum(float(loss_of(model, rows)) for rows in held_back) / len(held_back)

    whole = loss()
    print(f"as it is: loss {whole:.4f}, perplexity {math.exp(whole):.3f}", flush=True)
    results: list[dict[str, Any]] = [{"how": "as it is", "loss": whole, "perplexity": math.exp(whole)}]
    for how, group, rounds in (
        ("w8a16", 128, 0), ("w4a16", 128, 20), ("w4a16", 128, 0), ("w4a16", 64, 20), ("w4a16", 32, 20),
        ("w2a16", 32, 20), ("w8a8", 0, 0), ("fp8", 0, 0),
    ):  # fmt: skip
        done = quantize(model, how, skip=(), **({"group": group, "rounds": rounds} if group else {}))  # the head, too
        if left := [row.reason for row in done.rows if not row.is_changed]:
            print(f"{how} group {group:>3}: no figure, since layers were left: {left[0]}", flush=True)
            results.append({"how": how, "group": group, "rounds": rounds, "left": left[0]})
            unquantize(model)
            continue
        now = loss()
        unquantize(model)
        rise = math.exp(now - whole) - 1
        fitted = "fitted zeros" if rounds else "nearest" if group else "a scale a row"
        bar = BARS.get((how, group))
        word = "" if bar is None else f": {'within' if rise <= bar else 'beyond'} {bar:.0%}"
        size = units.text(done.after_bytes, "B")
        print(
            f"{how} group {group:>3}, {fitted:<13} perplexity {math.exp(now):.3f} ({rise:+.2%}{word}), {size}",
            flush=True,
        )
        results.append(
            {"how": how, "group": group, "rounds": rounds, "loss": now, "perplexity": math.exp(now), "rise": rise}
        )
    assert loss() == whole, "unquantize did not give the model back"
    if options.json:
        about = {
            "width": options.width,
            "layers": options.layers,
            "device": options.device,
            "letters": len(text),
            "seconds": options.seconds,
            "torch": torch.__version__,
        }
        options.json.write_text(json.dumps({**about, "rows": results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
