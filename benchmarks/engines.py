"""Decoding on a GPU in one call, in under four minutes: tokens a second beside the limit (training: train_step.py).

    python benchmarks/engines.py --json engines.json          everything
    python benchmarks/engines.py --tiny --device cpu          tiny models, to see that it runs

Decoding has the shape of Llama-3-8B with random weights, 1024 tokens of context, batch 1 and 64: eager and compiled
over a contiguous cache, ours over pages, ours as CUDA graphs. Every part runs in a process of its own with a time
limit: what hangs or fails costs its own rows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublight.results import write_json

if TYPE_CHECKING:
    import torch

    from sublight.engines.generate.llama import Cache, Llama

Row = dict[str, Any]
LIMIT_S = {  # of each process, 239 s together; what compiles needs the most
    "decode": {"eager": 20.0, "ours": 22.0, "graphs": 22.0, "compile": 70.0},
}
WARMUP = 10  # steps: some until a graph is captured
MEASURED_S = 4.0  # of steps, after those that warm up


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of a run for figures, or of one that shows that the script works."""

    context: int = 1024
    layers: int = 32
    dim: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    llama_vocab: int = 128256
    batches: tuple[int, ...] = (1, 64)
    room: int = 256  # tokens that a decoded text may get


TINY = Sizes(
    context=16, layers=1, dim=64, inner=64, heads=2, kv_heads=1, llama_vocab=64,
    batches=(1, 3), room=200,
)  # fmt: skip


def timed(step: Callable[[], Any], device: str, *, warmup: int, most: int) -> tuple[int, float]:
    """How many steps, and their seconds; the device is waited for once, at the end."""
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(warmup):
        step()
    wait()
    begin = time.perf_counter()
    step()
    wait()
    count = max(1, min(most, int(MEASURED_S / max(time.perf_counter() - begin, 1e-9))))
    begin = time.perf_counter()
    for _ in range(count):
        step()
    wait()
    return count, time.perf_counter() - begin


def decode(mode: str, device: str, sizes: Sizes) -> Iterator[Row]:
    """Greedy decoding of a batch whose texts have `context` tokens already; one row a batch."""
    import torch

    from sublight.engines.generate import weights
    from sublight.engines.generate.config import Config
    from sublight.engines.generate.llama import Cache, Llama

    config = Config(
        layers=sizes.layers, dim=sizes.dim, inner=sizes.inner, heads=sizes.heads, kv_heads=sizes.kv_heads,
        head_dim=sizes.dim // sizes.heads, vocab=sizes.llama_vocab, longest=sizes.context + sizes.room, eps=1e-5,
        theta=5e5,
    )  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = weights.random(config, dtype=dtype, device=device)
    for batch in sizes.batches:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        model = Llama(config, made, mode="eager" if mode in ("eager", "compile") else "ours")
        page = 16
        width = -(-config.longest // page)
        cache = Cache(config, batch * width, page, made.tokens)
        cache.k.normal_()
        cache.v.normal_()
        step, wrapped = decode_step(model, cache, mode, batch, width, device, sizes)
        count, seconds = timed(step, device, warmup=WARMUP, most=sizes.room - WARMUP - 1)
        read = sum(x.numel() * x.element_size() for block in made.blocks for x in _tensors(block))
        read += made.head.numel() * made.head.element_size()
        keys = batch * sizes.context * 2 * config.kv_heads * config.head_dim * config.layers * cache.k.element_size()
        floor = _memory_rate(device)
        row = {"part": "decode", "mode": mode, "batch": batch, "context": sizes.context, "dtype": str(dtype)[6:]}
        figures = _figures(count * batch / seconds, floor and floor * batch / (read + keys), device)
        yield row | figures | {"steps": count, "note": wrapped()}


def decode_step(
    model: Llama, cache: Cache, mode: str, batch: int, width: int, device: str, sizes: Sizes
) -> tuple[Callable[[], None], Callable[[], str]]:
    """One token for every text, all on the device; and what a graph has to say of itself."""
    import torch

    import sublight
    from sublight.fix.graph.callable import Graph

    page = cache.k.shape[2]
    if mode in ("eager", "compile"):
        model.layers = contiguous(model.layers, batch)
    elif device == "cuda":
        model.layers = our_kernels(model.layers)
    table = torch.arange(batch * width, dtype=torch.int32, device=device).view(batch, width)
    first = torch.arange(batch, device=device) * width * page
    ids = torch.arange(batch, device=device) % sizes.llama_vocab
    positions = torch.full((batch,), sizes.context, dtype=torch.int64, device=device)

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        lengths = (positions + 1).to(torch.int32)
        return model.decode(ids, positions, first + positions, table, lengths, cache).argmax(-1)

    call: Callable[..., torch.Tensor] = forward
    if mode == "compile":
        for x in (cache.k, cache.v):
            torch._dynamo.mark_static_address(x)  # else its graphs refuse a cache that is written in place
        call = torch.compile(forward, mode="reduce-overhead", dynamic=False)
    elif mode == "graphs":
        call = sublight.graph(forward)

    def step() -> None:
        nonlocal ids
        ids = call(ids, positions).clone()
        positions.add_(1)

    return step, lambda: str(call.report())[:400] if isinstance(call, Graph) else ""


def contiguous(layers: Any, batch: int) -> Any:
    """PyTorch's way: each text has a row of one large cache, and attention is the fused one under a mask."""
    import torch
    import torch.nn.functional as F

    def write(
        k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        k_cache.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
        v_cache.view(-1, *v.shape[1:]).index_copy_(0, slots, v)

    def attend(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        _: torch.Tensor,
        lengths: torch.Tensor,
        **how: Any,
    ) -> torch.Tensor:
        k, v = (x.view(batch, -1, *x.shape[2:]).transpose(1, 2) for x in (k_cache, v_cache))
        seen = torch.arange(k.shape[2], device=q.device) < lengths[:, None]
        out = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=seen[:, None, None], enable_gqa=True)
        return out[:, :, 0]

    return replace(layers, kv_write=write, paged_attention=attend)


def our_kernels(layers: Any) -> Any:
    """By name: a call without one goes to PyTorch's where ours were never timed."""
    from functools import partial

    return replace(
        layers,
        kv_write=partial(layers.kv_write, provider="sublight"),
        paged_attention=partial(layers.paged_attention, provider="sublight"),
    )


def _tensors(block: Any) -> list[Any]:
    return [x for x in (getattr(block, name) for name in block.__slots__) if x is not None]


def _memory_rate(device: str) -> float | None:
    """Bytes a second: as measured here, else the vendor's."""
    from sublight.limits import run

    machine = run.this_machine("cuda" if device == "cuda" else "cpu")
    found = run.cached(machine)
    if found and (rate := found.memory_rate(1.0, 0.0)):
        return rate
    return machine.gpu.memory_bytes_per_s if machine.gpu else None


def _figures(tokens_per_s: float, floor: float | None, device: str) -> Row:
    import torch

    memory = torch.cuda.max_memory_allocated() if device == "cuda" else None
    fraction = tokens_per_s / floor if floor else None
    return {
        "tokens_per_s": tokens_per_s,
        "limit_tokens_per_s": floor,
        "fraction": fraction,
        "memory_bytes": memory,
    }


def run_part(part: str, mode: str, words: Sequence[str]) -> list[Row]:
    """In a process of its own; its rows, and one that says why there are no more."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--part", part, mode, "--json", str(out), *words]
        limit_s, error = LIMIT_S[part][mode], ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
            if done.returncode:
                error = (done.stderr.strip().splitlines() or ["no word"])[-1][:300]
        except subprocess.TimeoutExpired:
            error = f"not done within {limit_s:.0f} s"
        rows: list[Row] = json.loads(out.read_text()) if out.exists() else []
        return [*rows, *([{"part": part, "mode": mode, "error": error}] if error else [])]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a row, against the first mode of its part and batch."""
    lines = [f"{'part':8}{'mode':9}{'batch':>6}{'tokens/s':>12}{'of eager':>10}{'of limit':>10}{'memory':>10}"]
    for row in rows:
        head = f"{row['part']:8}{row['mode']:9}"
        if "error" in row:
            lines.append(f"{head}  {row['error']}")
            continue
        same = (each for each in rows if each["part"] == row["part"] and each.get("batch") == row["batch"])
        eager = next((each["tokens_per_s"] for each in same if each["mode"] == "eager"), None)
        ratio = f"{row['tokens_per_s'] / eager:.2f}" if eager else "–"
        share = f"{100 * row['fraction']:.0f} %" if row["fraction"] else "–"
        memory = f"{row['memory_bytes'] / 1e9:.1f} GB" if row["memory_bytes"] else "–"
        loss = f"  loss {row['loss']:.4f}" if "loss" in row else ""
        lines.append(f"{head}{row['batch']:>6}{row['tokens_per_s']:>12,.0f}{ratio:>10}{share:>10}{memory:>10}{loss}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(LIMIT_S), help="one of the two")
    parser.add_argument("--tiny", action="store_true", help="tiny models: shows that it runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    parser.add_argument("--part", nargs=2, metavar=("PART", "MODE"), help="this part, in this process")
    given = parser.parse_args()
    if given.part:
        part, mode = given.part
        measure = {"decode": decode}[part]
        found: list[Row] = []
        for row in measure(mode, given.device, TINY if given.tiny else Sizes()):
            found.append(row)
            write_json(found, Path(given.json))  # whole at any moment: the next row may never come
        return
    words = ["--device", given.device, *["--tiny"] * given.tiny]
    parts = [(part, mode) for part in LIMIT_S if given.only in (None, part) for mode in LIMIT_S[part]]
    rows: list[Row] = []
    for part, mode in parts:
        rows += run_part(part, mode, words)
        print(f"{part} {mode} done", file=sys.stderr, flush=True)
    print(table(rows))
    if given.json:
        write_json(rows, Path(given.json))


if __name__ == "__main__":
    main()
