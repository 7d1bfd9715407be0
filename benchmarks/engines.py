"""Decoding on a GPU in one call, in under five minutes: tokens a second beside the limit (training: train_step.py).

    python benchmarks/engines.py --json engines.json          everything
    python benchmarks/engines.py --modes int4 --batches 64    a part of it
    python benchmarks/engines.py --tiny --device cpu          tiny models, to see that it runs

Decoding has the shape of Llama-3-8B with random weights, greedy, 1024 tokens of context, batch 1 and 64. `graphs` is
the engine as a user has it: requests, scheduler, pages, a CUDA graph for each size of batch; `launches` the same
without graphs, `int4` with weights of four bits. `eager`, `captured`: the engine on PyTorch's ops, without and with
graphs. `compile` is a loop like gpt-fast's: the same model on PyTorch's ops over a contiguous cache, under
torch.compile(mode="reduce-overhead"). The limit is what the weights and the cache, as long as it is on average while
timed, take to read. Every part runs in a process of its own with a time
limit: what hangs or fails costs its own rows. After the table: where a step's time goes, by kernel.
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

    from sublight.engines.generate.config import Config
    from sublight.engines.generate.llama import Weights

Row = dict[str, Any]
LIMIT_S = {  # of each process; what compiles needs the most
    "decode": {
        **{"graphs": 40.0, "launches": 18.0, "int4": 50.0, "eager": 18.0, "captured": 18.0},
        "compile": 115.0,
    },
}
BASE = {"train": "eager", "decode": "compile"}  # what the others are compared with
PROFILED = 3  # steps
BEGIN_S = time.perf_counter()
WARMUP = 10  # steps: some until a graph is captured
MEASURED_S = 2.0  # of steps, after those that warm up


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
    room: int = 160  # tokens that a decoded text may get


TINY = Sizes(
    context=16, layers=1, dim=128, inner=128, heads=2, kv_heads=1, llama_vocab=64,
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
    made = weights.random(config, dtype=dtype, device=device, how="w4a16" if mode == "int4" else "")
    rate = _memory_rate(device)
    usual = sizes.batches if mode in ("graphs", "int4") else sizes.batches[:1]  # compiling takes a minute
    for batch in batches or usual:
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        print(f"{mode}, batch {batch}: begins at {time.perf_counter() - BEGIN_S:.0f} s", file=sys.stderr, flush=True)
        step, note = (by_compile if mode == "compile" else by_engine)(config, made, mode, batch, device, sizes)
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
    """The engine's own step, from when every prompt is in the cache."""
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
    """One token for every text, all on the device; the host never looks at one."""
    import torch

    from sublight.engines.generate.llama import Cache, Llama

    page = 16
    width = -(-config.longest // page)
    model = Llama(config, made, mode="eager")
    model.layers = contiguous(model.layers, batch)
    cache = Cache(config, batch * width, page, made.tokens)
    for x in (cache.k, cache.v):
        x.normal_()
        torch._dynamo.mark_static_address(x)  # else its graphs refuse a cache that is written in place
    table = torch.arange(batch * width, dtype=torch.int32, device=device).view(batch, width)
    first = torch.arange(batch, device=device) * width * page
    ids = torch.arange(batch, device=device) % sizes.llama_vocab
    positions = torch.full((batch,), sizes.context, dtype=torch.int64, device=device)

    def forward(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        lengths = (positions + 1).to(torch.int32)
        return model.decode(ids, positions, first + positions, table, lengths, cache).argmax(-1)

    call = torch.compile(forward, mode="reduce-overhead", dynamic=False)

    def step() -> None:
        nonlocal ids
        ids = call(ids, positions).clone()
        positions.add_(1)

    return step, lambda: {"keys": batch * int(positions[0])}


def by_kernel(step: Callable[[], None]) -> list[Row]:
    """What runs on the GPU in a step, the dearest first."""
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


def contiguous(layers: Any, batch: int) -> Any:
    """PyTorch's way: each text has a row of one large cache, and attention is the fused one under a mask."""
    import torch
    import torch.nn.functional as F

    from sublight.engines.generate.layers import turn_then

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

    return replace(layers, rope_kv_write=turn_then(write), paged_attention=attend)


def _memory_rate(device: str) -> float | None:
    """Bytes a second that can be read: as measured on this machine, else on one like it, else the vendor's."""
    from sublight.limits import run
    from sublight.results import read_limits_file

    machine = run.this_machine("cuda" if device == "cuda" else "cpu")
    found = run.cached(machine)
    recorded = Path(__file__).parents[1] / "examples/recorded/h200/limits.json"
    if found is None and machine.gpu and machine.gpu.key == "h200" and recorded.exists():
        found = read_limits_file(recorded)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(LIMIT_S), help="one of the two")
    parser.add_argument("--modes", default="", help="of them, these alone: graphs,int4")
    parser.add_argument("--batches", default="", help="these alone: 1,64")
    parser.add_argument("--tiny", action="store_true", help="tiny models: shows that it runs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", metavar="FILE", help="write the rows here as well")
    parser.add_argument("--part", nargs=2, metavar=("PART", "MODE"), help="this part, in this process")
    given = parser.parse_args()
    if given.part:
        part, mode = given.part
        measure = {"decode": decode}[part]
        found: list[Row] = []
        batches = [int(each) for each in given.batches.split(",") if each]
        for row in measure(mode, given.device, TINY if given.tiny else Sizes(), batches):
            found.append(row)
            write_json(found, Path(given.json))  # whole at any moment: the next row may never come
        return
    words = ["--device", given.device, *["--tiny"] * given.tiny, *(["--batches", given.batches] * bool(given.batches))]
    modes = given.modes.split(",") if given.modes else [mode for each in LIMIT_S.values() for mode in each]
    parts = [(part, mode) for part in LIMIT_S if given.only in (None, part) for mode in LIMIT_S[part] if mode in modes]
    rows: list[Row] = []
    for part, mode in parts:
        rows += run_part(part, mode, words)
        if given.json:
            write_json(rows, Path(given.json))
        print(f"{part} {mode} done", file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
