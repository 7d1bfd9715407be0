"""GPT-2 124M in training on a GPU, 1024 tokens a sequence, bf16: what ours brings, in one call of 200 s.

    python benchmarks/train_step.py --json train.json         everything
    python benchmarks/train_step.py --only graph              one part: graph, loss, compile, eager, ours
    python benchmarks/train_step.py --tiny --device cpu       a tiny model, to see that it runs

Tokens a second and memory at batch 32 and 64: PyTorch's model eager and under torch.compile (with the attention that
PyTorch chooses, cuDNN's on an H200, and its fused AdamW), ours launch by launch, ours as a CUDA graph; with clipping.
Of the graph one step by op, each beside its floor. The losses of 200 steps in bf16 beside those in fp32, eager, from
the same seed. Every part runs in a process of its own with a time limit: what hangs or fails costs its own rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublight.results import write_json

if TYPE_CHECKING:
    import torch

    from sublight.engines.train.update import Update

Row = dict[str, Any]
LIMIT_S = {"graph": 45.0, "ours": 20.0, "eager": 22.0, "compile": 80.0, "loss": 65.0}
TOTAL_S = 200.0  # time limit of all parts together: the last ones get what is left
WARMUP = 6  # steps, after which the graph has been captured
MEASURED_S = 2.5
LOSS_STEPS, LOSS_BATCH, LAST = 200, 8, 10  # fp32 is slow; the mean of the last losses is compared
KERNELS = (  # what a kernel is for, by a pattern of its name; the first that fits counts
    ("torch.compile's fusions", r"^triton_"),
    ("attention", r"fmha|flash|sdpa|attention"),
    ("biases' gradients", r"gemv|gemmk1|dot_kernel|reduce_1Block"),
    ("products", r"nvjet|gemm|cutlass|splitK|cublas"),
    ("gelu", r"gelu|Gelu"),
    ("loss", r"_row_kernel|_prepare_kernel|_trailing_kernel|_total_kernel|_scale_kernel"),
    ("norms", r"_forward_kernel|_ring_backward_kernel|_backward_kernel|_shares_kernel|layer_norm"),
    ("heads' gradients joined", r"CatArray"),
    ("AdamW", r"_update_kernel|_tick_kernel|_squares_kernel|_join_kernel|multi_tensor"),
    ("embedding", r"_gather_kernel|_keys_kernel|_ends_kernel|_runs_kernel|_rows_kernel|[Rr]adix|embedding|indices"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a real run, or of a tiny one that shows that the script works."""

    depth: int = 12
    vocab: int = 50304
    batches: tuple[int, ...] = (32, 64)
    context: int = 1024
    loss_steps: int = LOSS_STEPS
    loss_batch: int = LOSS_BATCH


TINY = Sizes(depth=1, vocab=256, batches=(2, 3), context=16, loss_steps=12, loss_batch=2)


def updated(mode: str, attention: str, dtype: str, device: str, sizes: Sizes, batch: int, *, graph: bool) -> Update:
    """The training step of a model of a fixed seed, ready to run."""
    import torch

    from sublight.engines.train.gpt2 import Gpt2
    from sublight.engines.train.settings import Settings
    from sublight.engines.train.shape import by_depth
    from sublight.engines.train.update import Update

    how: Any = {"mode": mode, "attention": attention}
    shape = by_depth(sizes.depth, context=sizes.context, vocab=sizes.vocab)
    model = Gpt2(shape, **how, device=device, compute=getattr(torch, dtype)).initialize(1).to(device)
    settings = Settings(
        steps=sizes.loss_steps, batch=batch, context=sizes.context, lr=6e-4, warmup=20, dtype=dtype, graph=graph, **how
    )
    update = Update(model, settings, torch.device(device))
    update.prepare()
    return update


def speed(part: str, device: str, sizes: Sizes) -> Iterator[Row]:
    """Tokens a second and memory, a row a batch; of graphs also a step by op."""
    import torch

    mode = part if part in ("eager", "compile") else "ours"
    attention = "naive" if device != "cuda" else "ours" if mode == "ours" else "torch"
    dtype = "bfloat16" if device == "cuda" else "float32"
    for batch in sizes.batches[: 1 if part == "ours" else None]:
        gc.collect()
        if device == "cuda":
            torch.compiler.reset()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        update = updated(mode, attention, dtype, device, sizes, batch, graph=part == "graph")
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, sizes.vocab, (1, batch, sizes.context + 1), generator=generator).to(device)
        for _ in range(WARMUP):
            loss, _ = update(ids, 6e-4)
        _wait(device)
        ready_s = time.perf_counter() - begin
        count, seconds = timed(update, ids, device)
        row = {"part": part, "batch": batch, "tokens_per_s": count * batch * sizes.context / seconds, "steps": count}
        row |= {"step_ms": 1e3 * seconds / count, "ready_s": ready_s, "loss": float(loss)} | memory(device)
        yield row | ({"why_no_graph": update.why_no_graph(), "products": update.products} if part == "graph" else {})
        if part in ("graph", "compile") and batch == sizes.batches[0]:
            yield {"part": part, "table": by_op(update, ids, device, sizes, batch)}
        del update


def memory(device: str) -> Row:
    """At the peak of what tensors held, and what the process has of the device; a graph keeps its own."""
    import torch

    if device != "cuda":
        return {"memory_bytes": None, "used_bytes": None}
    free, total = torch.cuda.mem_get_info()
    return {"memory_bytes": torch.cuda.max_memory_allocated(), "used_bytes": total - free}


def timed(update: Update, ids: torch.Tensor, device: str) -> tuple[int, float]:
    """How many steps, and their seconds; the device is waited for once, at the end."""
    begin = time.perf_counter()
    update(ids, 6e-4)
    _wait(device)
    count = max(1, int(MEASURED_S / max(time.perf_counter() - begin, 1e-9)))
    begin = time.perf_counter()
    for _ in range(count):
        update(ids, 6e-4)
    _wait(device)
    return count, time.perf_counter() - begin


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def by_op(update: Update, ids: torch.Tensor, device: str, sizes: Sizes, batch: int) -> list[Row]:
    """One step's kernels by what they are for, each beside the time below which it cannot go."""
    from torch.profiler import ProfilerActivity, profile

    steps = 3
    with profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            update(ids, 6e-4)
        _wait(device)
    total: dict[str, float] = {}
    count: dict[str, int] = {}
    names: dict[str, dict[str, float]] = {}
    for event in profiled.key_averages():
        own_s = (event.self_device_time_total if device == "cuda" else event.self_cpu_time_total) * 1e-6 / steps
        if own_s <= 0:
            continue
        kind = next((kind for kind, pattern in KERNELS if re.search(pattern, event.key)), "other")
        total[kind] = total.get(kind, 0.0) + own_s
        count[kind] = count.get(kind, 0) + event.count // steps
        names.setdefault(kind, {})[event.key[:90]] = own_s
    known = floors(sizes, batch, *limits(device))
    return [
        {
            "op": kind,
            "launches": count[kind],
            "ms": 1e3 * total[kind],
            "floor_ms": known.get(kind),
            "kernels": dict(sorted(((n, 1e3 * s) for n, s in names[kind].items()), key=lambda each: -each[1])[:12]),
        }
        for kind in sorted(total, key=lambda kind: -total[kind])
    ]


def limits(device: str) -> tuple[float, float]:
    """The FLOP/s of a large product and the bytes/s of a large copy, measured in this process."""
    import torch

    dtype, size = (torch.bfloat16, 8192) if device == "cuda" else (torch.float32, 256)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    x, y = (torch.empty(size * size * 8, device=device, dtype=dtype) for _ in range(2))

    def best_s(call: Any) -> float:
        times = []
        for _ in range(8):
            _wait(device)
            begin = time.perf_counter()
            for _ in range(4):
                call()
            _wait(device)
            times.append((time.perf_counter() - begin) / 4)
        return sorted(times)[1]

    return 2 * size**3 / best_s(lambda: a @ b), 2 * x.nbytes / best_s(lambda: y.copy_(x))


def floors(sizes: Sizes, batch: int, flops_per_s: float, bytes_per_s: float) -> dict[str, float]:
    """Milliseconds of each op of a step: its FLOPs or the bytes that must pass, over the limit measured here."""
    from sublight.engines.train.shape import by_depth

    shape = by_depth(sizes.depth, context=sizes.context, vocab=sizes.vocab)
    tokens, layers = batch * sizes.context, sizes.depth
    products = 6 * tokens * (layers * 12 * shape.dim**2 + shape.vocab * shape.dim)
    attention = 3.5 * tokens * layers * 2 * sizes.context * shape.dim  # half of two products, and of five backward
    rows = 2 * tokens * shape.dim  # bytes of one 16-bit activation tensor
    logits = 2 * tokens * shape.vocab
    passed = {
        "norms": (2 * layers + 1) * 8 * rows,  # forward: sum and norm, two in, two out; backward: three in, one out
        "heads' gradients joined": layers * 6 * rows,
        "gelu": layers * 20 * rows,  # forward: in and out, four times as wide; backward: two in, one out
        "biases' gradients": layers * 5 * rows,
        "loss": 2 * logits,  # read, and written as their gradient
        "AdamW": 30 * shape.parameters,  # fp32 weight and averages read and written, 16-bit gradient and copy, norm
        "embedding": 4 * rows,
    }
    floor_s = {"products": products / flops_per_s, "attention": attention / flops_per_s}
    floor_s |= {name: size / bytes_per_s for name, size in passed.items()}
    return {name: 1e3 * seconds for name, seconds in floor_s.items()}


def loss(part: str, device: str, sizes: Sizes) -> Iterator[Row]:
    """Losses of one seed and one text, in fp32 by PyTorch and as ours trains."""

    from sublight.engines.train import source, tokens
    from sublight.engines.train.data import Order

    texts = source.read_texts(None, most_bytes=20_000_000)
    order = Order(tokens.choose("bytes", texts).encode("\n".join(texts)), sizes.context, 1)
    for name, mode, dtype in (
        ("ours", "ours", "bfloat16"),
        ("fp32", "eager", "float32"),
        ("eager", "eager", "bfloat16"),
    ):
        dtype = dtype if device == "cuda" else "float32"
        attention = {"ours": "ours", "eager": "torch"}.get(name, "naive") if device == "cuda" else "naive"
        update = updated(mode, attention, dtype, device, sizes, sizes.loss_batch, graph=True)
        seen: list[torch.Tensor] = []
        for step in range(sizes.loss_steps):
            ids = order.batch(step * sizes.loss_batch, sizes.loss_batch).to(device)
            seen.append(update(ids[None], update.settings.lr_at(step))[0])
        losses = [float(x) for x in seen]
        yield {"part": part, "name": name, "batch": sizes.loss_batch, "losses": losses,
               "last": sum(losses[-LAST:]) / LAST, "why_no_graph": update.why_no_graph()}  # fmt: skip
        del update


def run_part(part: str, words: Sequence[str], limit_s: float) -> list[Row]:
    """In a process of its own; its rows, and one that says why there are no more."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--part", part, "--json", str(out), *words]
        error = ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(limit_s, 1e-3))
            if done.returncode:
                error = (done.stderr.strip().splitlines() or ["no word"])[-1][:300]
        except subprocess.TimeoutExpired:
            error = f"not done within {limit_s:.0f} s"
        rows: list[Row] = json.loads(out.read_text()) if out.exists() else []
        return [*rows, *([{"part": part, "error": error}] if error else [])]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Speed beside torch.compile's best of the same batch, a step by op, and the losses."""
    best: dict[int, float] = {}
    for row in rows:
        if row["part"] == "compile" and "tokens_per_s" in row:
            best[row["batch"]] = max(best.get(row["batch"], 0.0), row["tokens_per_s"])
    lines = [
        f"{'part':9}{'batch':>6}{'tokens/s':>11}{'step':>10}{'of compile':>12}{'tensors':>10}{'device':>10}{'ready':>8}"
    ]
    for row in rows:
        if "tokens_per_s" in row:
            ratio = f"{row['tokens_per_s'] / best[row['batch']]:.3f}" if row["batch"] in best else "–"
            held, used = (f"{row[n] / 1e9:.1f} GB" if row[n] else "–" for n in ("memory_bytes", "used_bytes"))
            why = f"  no graph: {row['why_no_graph']}" if row.get("why_no_graph") else ""
            lines.append(
                f"{row['part']:9}{row['batch']:>6}{row['tokens_per_s']:>11,.0f}{row['step_ms']:>7.2f} ms{ratio:>12}"
                f"{held:>10}{used:>10}{row['ready_s']:>6.1f} s{why}"
            )
        elif "error" in row:
            lines.append(f"{row['part']:9}  {row['error']}")
    for row in rows:
        if "table" in row:
            lines.append(f"\none step of {row['part']:24}{'launches':>9}{'ms':>9}{'floor':>9}{'of it':>7}")
            for op in row["table"]:
                floor = f"{op['floor_ms']:.2f}" if op["floor_ms"] else "–"
                share = f"{100 * op['floor_ms'] / op['ms']:.0f} %" if op["floor_ms"] else "–"
                lines.append(f"  {op['op']:34}{op['launches']:>9}{op['ms']:>9.2f}{floor:>9}{share:>7}")
    losses = {row["name"]: row["last"] for row in rows if "losses" in row}
    for name, last in losses.items():
        apart = f", {100 * (last / losses['fp32'] - 1):+.2f} % of fp32's" if "fp32" in losses and name != "fp32" else ""
        lines.append(f"\nmean of the last {LAST} losses, {name}: {last:.4f}{apart}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(LIMIT_S), action="append", help="this part alone; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: shows that it runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    parser.add_argument("--part", choices=tuple(LIMIT_S), help="this part, in this process")
    args = parser.parse_args()
    if args.part:
        done: list[Row] = []
        for row in (loss if args.part == "loss" else speed)(args.part, args.device, TINY if args.tiny else Sizes()):
            done.append(row)
            write_json(done, Path(args.json))  # whole at any moment: the next row may never come
        return
    words = ["--device", args.device, *["--tiny"] * args.tiny]
    rows: list[Row] = []
    begin = time.perf_counter()
    for part in args.only or tuple(LIMIT_S):
        left_s = TOTAL_S - (time.perf_counter() - begin)
        rows += run_part(part, words, min(LIMIT_S[part], left_s))
        print(f"{part} done after {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        if args.json:
            write_json(rows, Path(args.json))
    print(table(rows))


if __name__ == "__main__":
    main()
