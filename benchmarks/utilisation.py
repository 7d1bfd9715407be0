"""A Llama in prefill and in decode, op by op against its floor, from a trace of the engine's own step.

    PYTHONPATH=. python benchmarks/utilisation.py --json utilisation.json      Llama-3-8B's shape, random weights, a GPU
    PYTHONPATH=. python benchmarks/utilisation.py --tiny --device cpu          tiny, to see that it runs

The model's functions are named while torch.profiler watches one step; a kernel belongs to the name under which the host
launched it. Steps are launched, not replayed from a graph, whose kernels have no names: the kernels are the same. On a
CPU an op's time is the host's. Floors are by the costs of `sublight.cost` and the limits measured on this machine, or,
on an H200 that has none, on ours.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from sublight.results import read_limits_file, write_json

Row = dict[str, Any]
Event = Mapping[str, Any]
LLAMA: Row = {"layers": 32, "dim": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 128256}
TINY: Row = {"layers": 2, "dim": 64, "inner": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 97}
PAGE = 16
MARK = "op: "  # prefix of our names in the trace


def by_name(events: Sequence[Event], device: str) -> dict[str, tuple[int, float]]:
    """Launches and seconds under each name: of kernels that were launched inside of it; on a CPU its own time.

    >>> name = {"cat": "user_annotation", "name": "op: norm", "ts": 10, "dur": 5, "tid": 1}
    >>> launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 12, "tid": 1, "args": {"correlation": 7}}
    >>> kernel = {"cat": "kernel", "name": "k", "ts": 90, "dur": 3, "args": {"correlation": 7}}
    >>> by_name([name, launch, kernel, {**kernel, "args": {"correlation": 8}}], "cuda")
    {'norm': (1, 3e-06), 'no op of the model': (1, 3e-06)}
    """
    names = [e for e in events if e.get("cat") == "user_annotation" and str(e.get("name", "")).startswith(MARK)]
    by_op: dict[str, list[float]] = defaultdict(list)
    if device == "cpu":
        for event in names:
            by_op[event["name"][len(MARK) :]].append(event["dur"] * 1e-6)
        return {name: (len(times), sum(times)) for name, times in by_op.items()}
    launched = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        call = launched.get(event["args"]["correlation"])
        inside = [e for e in names if call and e["tid"] == call["tid"] and 0 <= call["ts"] - e["ts"] <= e["dur"]]
        name = min(inside, key=lambda e: e["dur"])["name"][len(MARK) :] if inside else "no op of the model"
        by_op[name].append(event["dur"] * 1e-6)
    return {name: (len(times), sum(times)) for name, times in by_op.items()}


def costs(config: Row, *, rows: int, keys: int, texts: int, dtype: str) -> dict[str, tuple[int, Any]]:
    """How often each op runs in a step, and what it must do: `rows` new tokens of `texts` texts of `keys` keys."""
    from sublight.cost import attention, matmul, movement, norm, pointwise, reduce

    c = config
    heads = {"heads": c["heads"], "kv_heads": c["kv_heads"], "head_dim": c["head_dim"]}
    wide = c["heads"] * c["head_dim"]
    sizes = {
        **{"qkv": (wide + 2 * c["kv_heads"] * c["head_dim"], c["dim"]), "out": (c["dim"], wide)},
        **{"gate and up": (2 * c["inner"], c["dim"]), "down": (c["dim"], c["inner"])},
    }
    layers = c["layers"]
    by_op: dict[str, tuple[int, Any]] = {
        name: (layers, matmul.matmul({"m": rows, "n": n, "k": k}, dtype, "fwd")) for name, (n, k) in sizes.items()
    }
    per_text = {"batch": texts, "q_len": rows // texts, "kv_len": keys, **heads, "page": 16, "ragged": 0}
    by_op["attention"] = (layers, attention.paged_attention(per_text, dtype, "fwd"))
    by_op["rope and cache"] = (layers, attention.rope_kv_write({"tokens": rows, **heads, "page": 16}, dtype, "fwd"))
    by_op["norm"] = (2 * layers + 1, norm.add_rms_norm({"rows": rows, "cols": c["dim"]}, dtype, "fwd"))
    by_op["SwiGLU"] = (layers, pointwise.gated_activation({"rows": rows, "cols": c["inner"]}, dtype, "fwd"))
    by_op["embedding"] = (1, movement.embedding({"rows": rows, "vocab": c["vocab"], "cols": c["dim"]}, dtype, "fwd"))
    by_op["head"] = (1, matmul.matmul({"m": texts, "n": c["vocab"], "k": c["dim"]}, dtype, "fwd"))
    by_op["largest logit"] = (1, reduce.reduce_argmax({"outer": texts, "n": c["vocab"], "inner": 1}, dtype, "fwd"))
    return by_op


def named(model: Any, config: Row) -> None:
    """Wrap the model's functions so that the trace shows each under its name."""
    from torch.profiler import record_function

    of_weight = {
        ((config["heads"] + 2 * config["kv_heads"]) * config["head_dim"], config["dim"]): "qkv",
        (2 * config["inner"], config["dim"]): "gate and up",
        (config["dim"], config["inner"]): "down",
        (config["vocab"], config["dim"]): "head",
    }
    plain = {
        **{"rms_norm": "norm", "add_rms_norm": "norm", "swiglu": "SwiGLU", "embedding": "embedding"},
        **{"rope_kv_write": "rope and cache", "paged_attention": "attention", "prefill_attention": "attention"},
    }

    def under(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            op = name
            if not op:
                weight = args[1] if call is layers.linear else args[2]
                op = of_weight.get(tuple(weight.shape), "out")
            with record_function(MARK + op):
                return call(*args, **options)

        return run

    layers = model.layers
    wrapped = {}
    for field in fields(layers):
        call = getattr(layers, field.name)
        if call is not None:
            wrapped[field.name] = under(call, plain.get(field.name, ""))
    model.layers = replace(layers, **wrapped)


def traced(step: Callable[[], Any], device: str) -> dict[str, tuple[int, float]]:
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    for _ in range(2):
        step()
    with profile(activities=kinds) as seen:
        step()
        if device == "cuda":
            import torch

            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        return by_name(json.loads(path.read_text())["traceEvents"], device)


def model_of(config: Row, device: str, longest: int) -> Any:
    import torch

    from sublight.engines.generate import weights
    from sublight.engines.generate.config import Config
    from sublight.engines.generate.llama import Llama

    made = Config(**config, longest=longest, eps=1e-5, theta=5e5)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Llama(made, weights.random(made, dtype=dtype, device=device), mode="ours" if device == "cuda" else "eager")
    named(model, config)
    return model


def step_of(model: Any, texts: int, length: int) -> Callable[[], Any]:
    """A decode step of texts of `length` tokens; of none, a prefill of so many."""
    import torch
    from torch.profiler import record_function

    from sublight.engines.generate.llama import Cache
    from sublight.engines.generate.sampling import largest

    like, width, count = model.weights.tokens, -(-length // PAGE), max(1, texts)
    cache = Cache(model.config, count * width, PAGE, like)
    table = torch.randperm(count * width, device=like.device).view(count, width)
    ids = torch.randint(model.config.vocab, (texts or length,), device=like.device)
    places = (table[:, :, None] * PAGE + torch.arange(PAGE, device=like.device)).flatten(1)  # of each text's tokens
    if texts:
        at = torch.full((texts,), length - 1, device=like.device)
        lengths = torch.full((texts,), length, dtype=torch.int32, device=like.device)
        forward = partial(model.decode, ids, at, places[:, length - 1], table.to(torch.int32), lengths, cache)
    else:
        forward = partial(model.prefill, ids, 0, places[0, :length], table[0], cache)

    def step() -> None:
        logits = forward()
        with record_function(MARK + "largest logit"):
            largest(logits.view(count, -1))

    return step


def measure(config: Row, device: str, *, batches: Sequence[int], context: int, chunk: int) -> list[Row]:
    """Rows of a prefill of `chunk` tokens and of decode steps, over texts of `context` tokens."""
    model = model_of(config, device, max(context, chunk) + PAGE)
    dtype = str(model.weights.tokens.dtype)[6:]
    rows: list[Row] = []
    for texts in (0, *batches):  # 0: prefill
        length = context if texts else chunk
        floors = costs(config, rows=texts or chunk, keys=length, texts=texts or 1, dtype=dtype)
        times = traced(step_of(model, texts, length), device)
        title = f"decode, batch {texts}, {context} tokens each" if texts else f"prefill of {chunk} tokens"
        for name in (*floors, *(name for name in times if name not in floors)):
            calls, seconds = times.get(name, (0, 0.0))
            rows.append({"step": title, "op": name, "launches": calls, "s": seconds, "cost": floors.get(name)})
    return _with_floors(rows, device)


def _with_floors(rows: list[Row], device: str) -> list[Row]:
    from sublight.limits import run

    machine = run.this_machine("cuda" if device == "cuda" else "cpu")
    limits = run.cached(machine)
    recorded = Path(__file__).parents[1] / "examples/recorded/h200/limits.json"
    if limits is None and machine.gpu and machine.gpu.key == "h200" and recorded.exists():
        limits = read_limits_file(recorded)
    for row in rows:
        cost = row.pop("cost")
        floor = limits.floor(cost[1]) if limits and cost else None
        # one row of decoding has most norms inside of products: no launch, no floor
        row["floor_s"] = min(cost[0], row["launches"]) * floor.seconds if floor and cost else None
        row["bound"] = floor.bound if floor else ""
    return rows


def table(rows: Sequence[Row]) -> str:
    """A table a step, in Markdown."""
    lines: list[str] = []
    for step in dict.fromkeys(row["step"] for row in rows):
        mine = [row for row in rows if row["step"] == step]
        total, floor = sum(row["s"] for row in mine), sum(row["floor_s"] or 0.0 for row in mine)
        lines += [f"\n{step}: {1e3 * total:.2f} ms in kernels, floor {1e3 * floor:.2f}\n"]
        lines += ["| op | launches | µs | floor | of it | bound |", "| --- | --- | --- | --- | --- | --- |"]
        for row in sorted(mine, key=lambda row: -row["s"]):
            known = row["floor_s"] is not None and row["s"]
            share = f"{100 * row['floor_s'] / row['s']:.0f} %" if known else ""
            least = f"{1e6 * row['floor_s']:.0f}" if row["floor_s"] is not None else ""
            lines.append(
                f"| {row['op']} | {row['launches']} | {1e6 * row['s']:.0f} | {least} | {share} | {row['bound']} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    batches, context, chunk = ((1, 3), 24, 20) if args.tiny else ((1, 64), 1024, 2048)
    rows = measure(TINY if args.tiny else LLAMA, args.device, batches=batches, context=context, chunk=chunk)
    if args.json:
        write_json(rows, Path(args.json))
    print(table(rows))


if __name__ == "__main__":
    main()
