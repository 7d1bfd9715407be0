"""Decoding on a GPU in one call, in under five minutes: tokens a second beside the limit (training: train_step.py).

    python benchmarks/engines.py --json engines.json          everything
    python benchmarks/engines.py --modes int4 --batches 64    a part of it
    python benchmarks/engines.py --tiny --device cpu          tiny models, to see that it runs

Decoding has the shape of Llama-3-8B with random weights, greedy, 1024 tokens of context, batch 1 and 64. `graphs` is
the engine as a user has it: requests, scheduler, pages, a CUDA graph for each size of batch; `launches` the same
without graphs, `int4` with weights of four bits, `int4+head` with a head of four bits, too. `eager`, `captured`: the
engine on PyTorch's ops, without and with graphs. `compile` is a loop like gpt-fast's: the same model on PyTorch's ops
over a contiguous cache, compiled, and replayed as a CUDA graph (compiled_loop.py); `tuned` the same with gpt-fast's
coordinate descent. The limit is what the weights and the cache, as long as it is on average while timed, take to read.
Every part runs in a process of its own with a time limit: what hangs or fails costs its own rows. After the table:
where a step's time goes, by kernel.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sublight.results import write_json

if TYPE_CHECKING:
    from sublight.engines.generate.config import Config
    from sublight.engines.generate.llama import Weights

Row = dict[str, Any]
LIMIT_S = {  # time limit of each process; those that compile need the most
    "decode": {
        **{"graphs": 40.0, "launches": 18.0, "int4": 50.0, "int4+head": 45.0, "eager": 18.0, "captured": 18.0},
        **{"compile": 40.0, "tuned": 90.0},
    },
}
PACKED = {"int4": "w4a16", "int4+head": "w4a16+head"}
BASE = {"train": "eager", "decode": "compile"}  # what the others are compared with
PROFILED = 3  # steps under the profiler
BEGIN_S = time.perf_counter()
WARMUP = 10  # steps: some until a graph is captured
MEASURED_S = 2.0  # steps are timed for so long, after those that warm up


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a real run, or of a tiny one that shows that the script works."""

    context: int = 1024
    layers: int = 32
    dim: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    llama_vocab: int = 128256
    batches: tuple[int, ...] = (1, 64)
    room: int = 160  # tokens that a decoded text may get


TINY = Sizes(
    context=16, layers=1, dim=128, inner=128, heads=2, kv_heads=1, llama_vocab=64,
    batches=(1, 3), room=200,
)  # fmt: skip


def timed(step: Callable[[], Any], device: str, *, warmup: int, most: int) -> tuple[int, float]:
    """Run steps for a while; returns their number and seconds. The device is waited for once, at the end."""
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


def decode(mode: str, device: str, sizes: Sizes, batches: Sequence[int] = ()) -> Iterator[Row]:
    """Greedy decoding of a batch whose texts have `context` tokens already; one row a batch."""
    import torch

    from sublight.engines.generate import weights
    from sublight.engines.generate.config import Config

    config = Config(
        layers=sizes.layers, dim=sizes.dim, inner=sizes.inner, heads=sizes.heads, kv_heads=sizes.kv_heads,
        head_dim=sizes.dim // sizes.heads, vocab=sizes.llama_vocab, longest=sizes.context + sizes.room, eps=1e-5,
        theta=5e5,
    )  # fmt: skip
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    made = weights.random(config, dtype=dtype, device=device, how=PACKED.get(mode, ""))
    rate = _memory_rate(device)
    usual = sizes.batches if mode == "graphs" or mode in PACKED else sizes.batches[:1]  # compiling takes a minute
    for batch in batches or usual:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        print(f"{mode}, batch {batch}: begins at {time.perf_counter() - BEGIN_S:.0f} s", file=sys.stderr, flush=True)
        step, note = (by_compile if mode in ("compile", "tuned") else by_engine)(
            config, made, mode, batch, device, sizes
        )
        ready_s = time.perf_counter() - begin
        count, seconds = timed(step, device, warmup=WARMUP, most=sizes.room - batch // 2 - WARMUP - PROFILED - 12)
        keys = note()["keys"] - batch * count / 2  # on average while timed
        token_bytes = 2 * config.kv_heads * config.head_dim * config.layers * made.tokens.itemsize
        floor = rate and rate * batch / (made.read_bytes + keys * token_bytes)
        row = {"part": "decode", "mode": mode, "batch": batch, "context": keys / batch, "dtype": str(dtype)[6:]}
        kernels = by_kernel(step) if device == "cuda" else []
        more = {"steps": count, "step_s": seconds / count, "kernels": kernels, "ready_s": ready_s, **note()}
        yield row | _figures(count * batch / seconds, floor, device) | more
        del step, note


def by_engine(
    config: Config, made: Weights, mode: str, batch: int, device: str, sizes: Sizes
) -> tuple[Callable[[], None], Callable[[], Row]]:
    """The engine's own steps, timed once every prompt is in the cache."""
    import random

    from sublight.engines.generate.engine import PAGE, Engine, Request
    from sublight.engines.generate.llama import Llama

    chance = random.Random(1)  # prompts that differ: pages are not shared
    is_ours = device == "cuda" and mode not in ("eager", "captured")
    model = Llama(config, made, mode="ours" if is_ours else "eager")
    pages = batch * -(-config.longest // PAGE)
    has_graphs = mode not in ("launches", "eager")
    engine = Engine(model, pages=pages, most_texts=batch, most_tokens=2048, graphs=has_graphs)
    prompts = [[chance.randrange(config.vocab) for _ in range(sizes.context)] for _ in range(batch)]
    texts = [engine.add(Request(prompt, sizes.room)) for prompt in prompts]
    while any(text.cached < sizes.context for text in texts):
        engine.step()
    decoder = engine.decoder

    def note() -> Row:
        keys = sum(text.cached for text in texts)
        return {"graphs": decoder.graph_count, "graph_bytes": decoder.graph_bytes, "keys": keys}

    def step() -> None:
        if len(engine.step()) != batch:
            raise RuntimeError("a text ended while the batch was timed: give it more room")

    return step, note


def by_compile(
    config: Config, made: Weights, mode: str, batch: int, device: str, sizes: Sizes
) -> tuple[Callable[[], None], Callable[[], Row]]:
    """Steps of one token for every text, chosen on the device without the host."""
    import functools

    import torch
    from compiled_loop import Loop

    if mode == "tuned":
        torch._inductor.config.coordinate_descent_tuning = True
    compiled = functools.partial(torch.compile, dynamic=False, fullgraph=True) if device == "cuda" else lambda f: f
    loop = Loop(config, made, batch, sizes.context, device, compiled)
    loop.step()
    return loop.step, lambda: {"keys": batch * int(loop.positions[0])}


def by_kernel(step: Callable[[], None]) -> list[Row]:
    """The kernels of a step with their times, the longest first."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    rows = [
        {"kernel": each.key[:90], "count": each.count / PROFILED, "us": each.self_device_time_total / PROFILED}
        for each in seen.key_averages()
        if each.self_device_time_total > 0 and str(each.device_type).endswith("CUDA")
    ]
    return sorted(rows, key=lambda row: -row["us"])[:20]


def _memory_rate(device: str) -> float | None:
    """The rate of reads from memory: measured on this machine, else on one like it, else the vendor's figure."""
    from sublight.limits import run
    from sublight.results import read_limits_file

    machine = run.this_machine("cuda" if device == "cuda" else "cpu")
    limits = run.cached(machine)
    recorded = Path(__file__).parents[1] / "examples/recorded/h200/limits.json"
    if limits is None and machine.gpu and machine.gpu.key == "h200" and recorded.exists():
        limits = read_limits_file(recorded)
    if limits and (rate := limits.memory_rate(1.0, 0.0)):
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
    """Run one part in a process of its own; returns its rows, and one more that says why it ended early."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--part", part, mode, "--json", str(out), *words]
        limit_s, error = LIMIT_S[part][mode], ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
            if done.returncode:
                error = " | ".join(done.stderr.strip().splitlines()[-4:] or ["no word"])[-900:]
        except subprocess.TimeoutExpired as cut:
            last = (cut.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
            error = " | ".join([f"not done within {limit_s:.0f} s", *last])
        rows: list[Row] = json.loads(out.read_text()) if out.exists() else []
        return [*rows, *([{"part": part, "mode": mode, "error": error}] if error else [])]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line a row, against the first mode of its part and batch."""
    lines = [f"{'part':8}{'mode':9}{'batch':>6}{'tokens/s':>12}{'of base':>10}{'of limit':>10}{'memory':>10}"]
    for row in rows:
        head = f"{row['part']:8}{row['mode']:9}"
        if "error" in row:
            lines.append(f"{head}  {row['error']}")
            continue
        same = (each for each in rows if each["part"] == row["part"] and each.get("batch") == row["batch"])
        base = next((each["tokens_per_s"] for each in same if each["mode"] == BASE[row["part"]]), None)
        ratio = f"{row['tokens_per_s'] / base:.2f}" if base else "–"
        share = f"{100 * row['fraction']:.0f} %" if row["fraction"] else "–"
        memory = f"{row['memory_bytes'] / 1e9:.1f} GB" if row["memory_bytes"] else "–"
        loss = f"  loss {row['loss']:.4f}" if "loss" in row else ""
        lines.append(f"{head}{row['batch']:>6}{row['tokens_per_s']:>12,.0f}{ratio:>10}{share:>10}{memory:>10}{loss}")
    for row in rows:
        if kernels := row.get("kernels"):
            busy = sum(each["us"] for each in kernels)
            whole = f"{1e6 * row['step_s']:.0f} µs a step, {busy:.0f} of them in kernels"
            lines.append(f"\n{row['mode']}, batch {row['batch']}: {whole}")
            lines += [
                f"  {each['us']:>8.1f} µs {each['count']:>6.0f} x  {each['kernel'][:70]}" for each in kernels[:14]
            ]
    return "\n".join(lines)


NAMES = {
    **{
        "graphs": "bf16",
        "launches": "bf16, launched without graphs",
        "int4": "int4",
        "int4+head": "int4, the head, too",
    },
    **{"eager": "PyTorch's ops, launched", "captured": "PyTorch's ops, graphs"},
    **{"compile": "a loop under torch.compile", "tuned": "the same, tuned"},
}


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of docs/engines.md."""
    lines = [
        "| decoding | batch | tokens/s | of the limit | a step | commit |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted((row for row in rows if "error" not in row), key=lambda row: row["batch"]):
        figures = f"{row['tokens_per_s']:,.0f} | {row['fraction']:.0%} | {1e3 * row['step_s']:.2f} ms"
        lines.append(f"| {NAMES[row['mode']]} | {row['batch']} | {figures.replace('%', ' %')} | {row['commit']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(LIMIT_S), help="one of the two")
    parser.add_argument("--modes", default="", help="of them, these alone: graphs,int4")
    parser.add_argument("--batches", default="", help="these alone: 1,64")
    parser.add_argument("--tiny", action="store_true", help="tiny models: shows that it runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    parser.add_argument("--part", nargs=2, metavar=("PART", "MODE"), help="this part, in this process")
    args = parser.parse_args()
    if args.part:
        part, mode = args.part
        measure = {"decode": decode}[part]
        done: list[Row] = []
        batches = [int(each) for each in args.batches.split(",") if each]
        for row in measure(mode, args.device, TINY if args.tiny else Sizes(), batches):
            done.append(row)
            write_json(done, Path(args.json))  # whole at any moment: the next row may never come
        return
    words = ["--device", args.device, *["--tiny"] * args.tiny, *(["--batches", args.batches] * bool(args.batches))]
    modes = args.modes.split(",") if args.modes else [mode for each in LIMIT_S.values() for mode in each]
    if unknown := [mode for mode in modes if not any(mode in each for each in LIMIT_S.values())]:
        parser.error(
            f"no such mode: {', '.join(unknown)}; there are {', '.join(m for e in LIMIT_S.values() for m in e)}"
        )
    parts = [(part, mode) for part in LIMIT_S if args.only in (None, part) for mode in LIMIT_S[part] if mode in modes]
    rows: list[Row] = []
    for part, mode in parts:
        rows += run_part(part, mode, words)
        if args.json:
            write_json(rows, Path(args.json))
        print(f"{part} {mode} done", file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
