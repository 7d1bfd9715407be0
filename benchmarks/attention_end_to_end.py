"""What fusing attention brings to a whole network: forward, backward, memory, and the loss, which must not change.

    python benchmarks/attention_end_to_end.py --json attention_end_to_end.json     three networks, at most 100 s
    python benchmarks/attention_end_to_end.py --tiny                               small ones, anywhere
    python benchmarks/attention_end_to_end.py --from FILE                          the table of an earlier run

Networks have the shapes of GPT-2 medium, BERT-large and Llama 3.2 1B, with random weights and tokens of a fixed seed,
under bf16 autocast. `written out` multiplies, masks, takes the softmax and multiplies again, with every score in
memory, as the networks were first published; `torch` is PyTorch's fused attention; `sublight` is this project's call,
which the plan sends where it is fastest; `flash` and `hopper` are our kernels by name. The share is that of attention
alone, timed at the same shape, in a step's forward and backward. The batch that fits comes from the peaks of two
batches, which lie on a line. The loss is that after some steps of AdamW.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from sublight import units
from sublight.ops.attention.attention import attention
from sublight.ops.attention.ladder import why_not

STEPS = 5  # training steps whose losses are compared
WAYS = ("written out", "torch", "sublight", "flash", "hopper")
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The sizes of one network."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    length: int
    batch: int
    causal: bool
    gated: bool = False

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


NETWORKS = {
    "GPT-2 medium": Network(
        layers=24, width=1024, heads=16, kv_heads=16, inner=4096, vocabulary=50304, length=1024, batch=8, causal=True
    ),
    "BERT-large": Network(
        layers=24, width=1024, heads=16, kv_heads=16, inner=4096, vocabulary=30528, length=512, batch=16, causal=False
    ),
    "Llama 3.2 1B": Network(
        layers=16, width=2048, heads=32, kv_heads=8, inner=8192, vocabulary=128256, length=4096, batch=1, causal=True,
        gated=True,
    ),
}  # fmt: skip


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) if share > 1 else x for x in (k, v))
    scores = (q @ k.mT) * q.shape[3] ** -0.5
    if causal:
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ v


def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])


def way(name: str) -> Attend:
    if name in ("written out", "torch"):
        return written_out if name == "written out" else fused
    provider = "" if name == "sublight" else name
    return lambda q, k, v, causal: attention(q, k, v, causal=causal, provider=provider)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, shape: Network, attend: Attend) -> None:
        super().__init__()
        self.shape, self.attend = shape, attend
        kv_width = shape.kv_heads * shape.head_dim
        self.before, self.between = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.qkv = nn.Linear(shape.width, shape.width + 2 * kv_width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, shape.inner * (2 if shape.gated else 1), bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        sizes = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        q, k, v = (
            each.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
            for each in self.qkv(self.before(x)).split(sizes, -1)
        )
        x = x + self.out(self.attend(q, k, v, shape.causal).transpose(1, 2).flatten(2))
        up = self.up(self.between(x))
        if shape.gated:
            gate, up = up.chunk(2, -1)
            return x + self.down(F.silu(gate) * up)
        return x + self.down(F.gelu(up))


class Model(nn.Module):
    def __init__(self, shape: Network, attend: Attend) -> None:
        super().__init__()
        self.table = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(shape.layers))
        self.last = nn.RMSNorm(shape.width)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.last(x[:, :-1]), self.table.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="where to write the rows")
    options.add_argument("--limit", type=float, default=100.0, help="seconds after which no further row is begun")
    options.add_argument("--from", dest="source", type=Path, help="show the rows of this file, measure nothing")
    options.add_argument("--tiny", action="store_true", help="small networks")
    args = options.parse_args()
    if args.source:
        try:
            rows = json.loads(args.source.read_text(encoding="utf-8"))["rows"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            options.error(f"cannot read rows from {args.source}: {type(error).__name__}")
        print("\n".join(table(rows)))
        return
    device, began = "cuda" if torch.cuda.is_available() else "cpu", time.monotonic()
    networks = {name: small(shape) for name, shape in NETWORKS.items()} if args.tiny else NETWORKS
    rows: list[dict[str, Any]] = []
    for name, network in product(WAYS, networks):  # a run that ends early has the first ways of every network
        if time.monotonic() - began > args.limit:
            print(f"stopped at the limit, before {network}, {name}")
            break
        if reason := why_no(name, networks[network], device):
            print(f"{network}, {name}: {reason}")
            continue
        try:
            rows.append({"network": network, "attention": name, **measured(networks[network], name, device)})
        except torch.OutOfMemoryError:
            print(f"{network}, {name}: does not fit into the GPU's memory")
        rows.sort(key=lambda row: list(networks).index(row["network"]))
        if args.json:
            write(args.json, rows)
    print("\n".join(table(rows)))


def small(shape: Network) -> Network:
    return replace(shape, layers=2, width=128, heads=4, kv_heads=2, inner=256, vocabulary=512, length=32, batch=2)


def why_no(name: str, shape: Network, device: str) -> str:
    """Why this way of attention does not take the network; empty where it does."""
    if name not in ("flash", "hopper"):
        return ""
    q, k = (
        torch.empty(1, heads, shape.length, shape.head_dim, dtype=torch.bfloat16, device=device)
        for heads in (shape.heads, shape.kv_heads)
    )
    return why_not(name, q, k, k, causal=shape.causal)


def measured(shape: Network, name: str, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device(device):  # weights drawn on a CPU take most of a run's time
        model = Model(shape, way(name))
    tokens = torch.randint(shape.vocabulary, (2 * shape.batch, shape.length), device=device)
    forward_s, backward_s = passes(lambda: loss_of(model, tokens[: shape.batch], device), device)
    peaks = [peak_bytes(model, tokens[:batch], device) for batch in (shape.batch, 2 * shape.batch)]
    alone = attention_alone(shape, way(name), device)
    losses = trained(model, tokens[: shape.batch], device)
    each = (peaks[1] - peaks[0]) / shape.batch
    room = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 0
    return {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "attention_forward_s": alone[0] * shape.layers,
        "attention_backward_s": alone[1] * shape.layers,
        "peak_bytes": peaks[0],
        "bytes_per_sequence": each,
        "batch_that_fits": int((room - peaks[0] + each * shape.batch) / each) if each > 0 and room else 0,
        "loss": losses,
        "batch": shape.batch,
        "length": shape.length,
    }


def loss_of(model: nn.Module, tokens: torch.Tensor, device: str) -> torch.Tensor:
    with torch.autocast(device, dtype=torch.bfloat16):
        return model(tokens)  # type: ignore[no-any-return]


def passes(call: Callable[[], torch.Tensor], device: str, times: int = 8) -> tuple[float, float]:
    """The medians of a forward and of a backward pass, in seconds, after two that warm up."""
    forward, backward = [], []
    for _ in range(times + 2):
        marks = [now(device)]
        loss = call()
        marks.append(now(device))
        loss.sum().backward()
        marks.append(now(device))
        spans = seconds(marks)
        forward.append(spans[0])
        backward.append(spans[1])
    return sorted(forward[2:])[times // 2], sorted(backward[2:])[times // 2]


def now(device: str) -> Any:
    if device == "cpu":
        return time.perf_counter()
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def seconds(marks: Sequence[Any]) -> list[float]:
    """Seconds from each mark to the next."""
    pairs = list(pairwise(marks))
    if isinstance(marks[0], float):
        return [after - before for before, after in pairs]
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def peak_bytes(model: nn.Module, tokens: torch.Tensor, device: str) -> int:
    if device == "cpu":
        return 0
    model.zero_grad(set_to_none=True)
    torch.cuda.reset_peak_memory_stats()
    loss_of(model, tokens, device).backward()
    return torch.cuda.max_memory_allocated()


def attention_alone(shape: Network, attend: Attend, device: str) -> tuple[float, float]:
    """One layer's forward and backward, in seconds; as many in a row as hide the host's time."""
    q, k, v = (
        torch.randn(shape.batch, heads, shape.length, shape.head_dim, dtype=torch.bfloat16, device=device)
        .transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    )  # fmt: skip
    turns = 4
    forward, backward = passes(
        lambda: torch.stack([attend(q, k, v, shape.causal).sum() for _ in range(turns)]).sum(), device
    )
    return forward / turns, backward / turns


def trained(model: nn.Module, tokens: torch.Tensor, device: str) -> list[float]:
    """The losses of some training steps; the first one is from before any step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, tokens, device)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """In Markdown; a network's rows follow one another, each beside the one whose scores are written out."""
    columns = ("", "attention", "forward ms", "backward ms", "its share", "step", "peak", "batch that fits", "loss")
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    for row in rows:
        first = next(each for each in rows if each["network"] == row["network"])
        step, before = row["forward_s"] + row["backward_s"], first["forward_s"] + first["backward_s"]
        share = (row["attention_forward_s"] + row["attention_backward_s"]) / step
        cells = (
            f"{row['network']}, {row['batch']} x {row['length']}" if row is first else "",
            row["attention"],
            f"{1e3 * row['forward_s']:.1f}",
            f"{1e3 * row['backward_s']:.1f}",
            f"{100 * share:.0f} %",
            f"{before / step:.2f} x",
            units.text(row["peak_bytes"], "B"),
            str(row["batch_that_fits"]),
            f"{row['loss'][-1]:.4f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    from sublight.results import write_json

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    head = {"gpu": gpu, "torch": torch.__version__, "date": datetime.now().astimezone().isoformat(timespec="seconds")}
    write_json({**head, "rows": rows}, path)


if __name__ == "__main__":
    main()
