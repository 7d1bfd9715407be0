"""Fits what `sublight predict` expects of kernels to measured rows, and checks it on rows that were held out.

    python benchmarks/predict_fit.py ROWS [--docs docs/predict.md]

ROWS is a folder with gemm_h100.csv, attention_h100.csv and mlp_vidur_a100.csv: published times of other people's
kernels (`SOURCE` and `A100_SOURCE` below say whose), which are not kept in this repository. Rows of this project's own
runs are read from benchmarks/*.json: memory-bound ops, and products (op `matmul`, shape m, n, k) and attention (shape
batch, q_len, kv_len, heads, kv_heads, head_dim, causal) where a run has at least `LEAST_ROWS` of them. Half of the
rows, drawn by a fixed seed, fit the parameters; the other half gives the errors. The tables that are written
(sublight/predict/efficiency.json) are of all rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sublight import cost, gpus
from sublight.cost.attention import attended
from sublight.predict import analytic, expected, machine, table
from sublight.predict.analytic import Heads, Rates

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "sublight" / "predict" / "efficiency.json"
SOURCE = (
    "ai-dynamo/aiconfigurator at 095f58a, Apache-2.0: bf16 products by TensorRT-LLM 1.3.0rc20, FlashAttention 3 by "
    "vLLM 0.24.0 with the cache's write, H100 SXM; 3,000 rows of each drawn evenly over the logarithms of the shape"
)
A100_SOURCE = "microsoft/vidur at 7d47513, MIT: fp16 layers of Llama 2 7B and 70B on an A100 80GB, medians of 20"
RIDGE, SMOOTH, ROBUST = 0.01, 0.05, 0.05
SEED = 1
LEAST_OF_ONE_OP = 3  # rows of a memory-bound op, for parameters of its own
LEAST_ROWS = 40  # of one kind, for a table of a run's own GPU
START = {
    "product": {
        **{"launch_s": 2.2e-6, "cold_s": 8e-7, "prologue_s": 1e-7, "store_s": 5e-7, "k_s": 1.4e-9, "split": 2.0},
        **{"split_s": 2.3e-6, "stream": 0.87, "sm_share": 2.0, "blend": 3.4},
    },
    "prefill attention": {
        **{"launch_s": 5.3e-6, "cold_s": 1.7e-6, "prologue_s": 1.5e-6, "rate": 0.88, "rate_64": 0.75, "tail": 0.6},
        **{"stream": 0.9},
    },
    "decode attention": {
        **{"launch_s": 4.5e-6, "cold_s": 1.8e-6, "walk_s": 3.9e-6, "walk_elements": 34000.0, "wave_s": 1.9e-6},
        **{"wave_walk_s": 3e-7, "write_s": 4e-11, "rate": 0.5, "rows": 16.0, "stream": 0.92, "blend": 1.7},
    },
    "stream": {"launch_s": 2e-6, "stream": 0.85, "long": 0.8, "long_backward": 0.6, "odd": 0.4},
}
MOST = {
    "stream": 1.0,
    "rate": 1.0,
    "rate_64": 1.0,
    "rows": 128.0,
    "blend": 12.0,
    "sm_share": 3.0,
    "tail": 1.0,
    "long": 1.0,
    "long_backward": 1.0,
    "odd": 1.0,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured case: its sizes, its seconds, and what the models say of it."""

    sizes: tuple[float, ...]
    seconds: float
    model: Callable[[dict[str, float]], float]
    roofline_s: float
    viewer_s: float


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def rates(gpu: machine.Machine) -> Rates:
    return expected.rates_of(gpu, "bfloat16")


def roofline(gpu: machine.Machine, flops: float, moved: float) -> float:
    return max(flops / gpu.peak("bfloat16"), moved / (gpu.gpu.memory_bytes_per_s or 1.0))


def viewer(gpu: machine.Machine, flops: float, moved: float) -> float:
    """LLM-Viewer's formula (hahnyuan/LLM-Viewer at 472f71f): a roofline with its own figure of the H100's memory."""
    bandwidth = 3072e9 if gpu.key == "h100" else gpu.gpu.memory_bytes_per_s or 1.0
    return max(flops / gpu.peak("bfloat16"), moved / bandwidth)


def product_row(gpu: machine.Machine, m: int, n: int, k: int, seconds: float, cold: float = 1.0) -> Row:
    spent = cost.find("matmul")({"m": m, "n": n, "k": k}, "bfloat16", "fwd")
    figures = rates(gpu)
    return Row(
        (m, n, k),
        seconds,
        lambda fitted: analytic.product_s(m, n, k, 1, spent.bytes, figures, fitted, cold),
        roofline(gpu, spent.total_flops, spent.bytes),
        viewer(gpu, spent.total_flops, spent.bytes),
    )


def attention_row(gpu: machine.Machine, row: dict[str, str], cold: float = 1.0) -> Row:
    names = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim")
    batch, queries, keys, heads, kv_heads, head_dim = (int(row[name]) for name in names)
    shape = Heads(batch=batch, queries=queries, keys=keys, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    sizes = dict(zip(names, (batch, queries, keys, heads, kv_heads, head_dim), strict=True)) | {"causal": 1}
    spent = cost.find("attention")(sizes, "bfloat16", "fwd")
    written = 8 * batch * queries * kv_heads * head_dim + 8 * batch * queries  # k and v read and written, and slots
    figures, is_decode = rates(gpu), row["phase"] == "generation"
    moved = spent.bytes + written
    pairs = batch * heads * queries * keys  # LLM-Viewer counts the whole square, and five operations of a softmax
    viewer_bytes = 2 * (batch * heads * queries * head_dim + 2 * batch * keys * heads * head_dim)
    viewer_bytes += 4 * batch * heads * queries * keys if is_decode else 4 * batch * heads * queries * head_dim
    assert attended(queries, keys, causal=True, bottom_right=True) <= queries * keys
    return Row(
        expected.sizes_of(shape),
        float(row["us"]) * 1e-6,
        (lambda fitted: analytic.decode_s(shape, moved, figures, fitted, cold))
        if is_decode
        else (lambda fitted: analytic.prefill_s(shape, moved, figures, fitted, cold=cold)),
        roofline(gpu, spent.total_flops, spent.bytes),
        viewer(gpu, 4.0 * pairs * head_dim + 5.0 * pairs, viewer_bytes),
    )


def fit(rows: Sequence[Row], start: dict[str, float], most_rows: int = 400) -> dict[str, float]:
    """Coordinate descent on the mean |log error|: each parameter up and down by a step that shrinks."""
    rows = rows[:most_rows]

    def loss(fitted: dict[str, float]) -> float:
        if any(value > MOST.get(name, math.inf) for name, value in fitted.items()):
            return math.inf
        return statistics.fmean(abs(math.log(row.model(fitted) / row.seconds)) for row in rows)

    best, least, step = dict(start), loss(start), 0.2
    while step > 0.01:
        before = least
        for name in best:
            for factor in (1 + step, 1 / (1 + step)):
                trial = {**best, name: best[name] * factor}
                if (found := loss(trial)) < least:
                    best, least = trial, found
                    break
        if least > before - 1e-4:
            step /= 2
    return {name: float(f"{value:.4g}") for name, value in best.items()}


def grid(rows: Sequence[Row], base: Sequence[float], axes: Sequence[Sequence[float]]) -> list[float]:
    """Node values whose interpolation is nearest to log(measured / analytic): least absolute error, smooth, near 0."""
    counts = [len(axis) for axis in axes]
    nodes = math.prod(counts)
    weights = np.zeros((len(rows), nodes))
    for place, row in enumerate(rows):
        for index, weight in table.corners(axes, [math.log2(size) for size in row.sizes]):
            weights[place, index] += weight
    target = np.array([math.log(row.seconds / seconds) for row, seconds in zip(rows, base, strict=True)])
    penalty = RIDGE * np.eye(nodes)
    places = np.arange(nodes).reshape(counts)
    for axis in range(len(counts)):
        left, right = np.take(places, range(counts[axis] - 1), axis), np.take(places, range(1, counts[axis]), axis)
        for one, other in zip(left.ravel(), right.ravel(), strict=True):
            penalty[[one, other], [one, other]] += SMOOTH
            penalty[[one, other], [other, one]] -= SMOOTH
    importance = np.ones(len(rows))
    for _ in range(6):
        weighted = weights * importance[:, None]
        found = np.linalg.solve(weighted.T @ weights + penalty, weighted.T @ target)
        importance = ROBUST / np.maximum(np.abs(target - weights @ found), 0.02)
    return [round(float(value), 4) for value in found]


def errors(predicted: Iterable[float], rows: Sequence[Row]) -> tuple[float, float]:
    """Median and 90th percentile of |predicted / measured - 1|."""
    found = sorted(abs(seconds / row.seconds - 1) for seconds, row in zip(predicted, rows, strict=True))
    return round(statistics.median(found), 4), round(found[math.ceil(0.9 * len(found)) - 1], 4)


def corrected(rows: Sequence[Row], base: Sequence[float], axes: Any, values: Sequence[float]) -> list[float]:
    logs = [table.interpolate(axes, values, [math.log2(size) for size in row.sizes]) for row in rows]
    return [seconds * math.exp(log) for seconds, log in zip(base, logs, strict=True)]


def halves(rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    order = np.random.default_rng(SEED).permutation(len(rows))
    return [rows[place] for place in order[::2]], [rows[place] for place in order[1::2]]


def checked(
    kind: str, gpu: str, rows: list[Row], axes: Any, source: str = SOURCE
) -> tuple[dict[str, float], dict[str, Any], dict[str, Any]]:
    """Parameters, the table of all rows, and the errors on the half that neither saw."""
    known, held = halves(rows)
    fitted = fit(known, START[kind])
    base = {id(row): row.model(fitted) for row in rows}
    known_base, held_base = [base[id(row)] for row in known], [base[id(row)] for row in held]
    values = grid(known, known_base, axes)
    table_error = errors(corrected(held, held_base, axes, values), held)
    check = {
        "what": f"{kind}, {gpu}",
        "rows": len(held),
        "table": table_error,
        "analytic": errors(held_base, held),
        "roofline": errors([row.roofline_s for row in held], held),
        "viewer": errors([row.viewer_s for row in held], held),
    }
    made = {
        "gpu": gpu,
        "architecture": gpus.find(gpu).architecture,
        "kind": kind,
        "axes": axes,
        "values": grid(rows, [base[id(row)] for row in rows], axes),
        "median_error": table_error[0],
        "p90_error": table_error[1],
        "rows": len(rows),
        "source": source,
    }
    return fitted, made, check


def steps(first: int, last: int, step: int) -> list[float]:
    return [float(value) for value in range(first, last + step, step)]


def of_runs() -> dict[str, dict[tuple[Any, ...], dict[str, Any]]]:
    """The fastest row of each case of this project's own runs, by GPU."""
    found: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for path in sorted((ROOT / "benchmarks").glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in run["rows"] if "op" in row] if isinstance(run, dict) and "rows" in run else []
        if not rows:
            continue
        cases = found.setdefault(gpus.find(run["gpu"]).key, {})
        for row in rows:
            if row.get("median_s") and row.get("cache", "cold") == "cold" and row["dtype"] == "bfloat16":
                key = (row["op"], row["direction"], *row["shape"].items())
                if key not in cases or row["median_s"] < cases[key]["median_s"]:
                    cases[key] = row
    return found


def cold_of(row: dict[str, Any], gpu: machine.Machine) -> float:
    """What of a row's inputs the L2 had lost: buffers were used in turn, `buffer_sets` of them."""
    return (
        analytic.cold_share(row["bytes"] * row["buffer_sets"], gpu.gpu.l2_bytes or 1) if "buffer_sets" in row else 1.0
    )


def rows_of_run(gpu: str, cases: Iterable[dict[str, Any]]) -> dict[str, list[Row]]:
    """Products and attention of a run, by the kind of table that they make."""
    here = machine.find(gpu)
    found: dict[str, list[Row]] = {"product": [], "prefill attention": [], "decode attention": []}
    for row in cases:
        shape = row["shape"]
        if row["op"] in ("matmul", "linear") and row["direction"] == "fwd":
            sizes = shape["m"], shape["n"], shape["k"]
            found["product"].append(product_row(here, *sizes, row["median_s"], cold_of(row, here)))
        if row["op"] in ("attention", "paged_attention") and row["direction"] == "fwd" and shape.get("causal", 1):
            phase = "generation" if shape["q_len"] == 1 else "context"
            words = {name: str(size) for name, size in shape.items()} | {"phase": phase}
            kind = "decode attention" if phase == "generation" else "prefill attention"
            found[kind].append(attention_row(here, words | {"us": str(row["median_s"] * 1e6)}, cold_of(row, here)))
    return {kind: rows for kind, rows in found.items() if len(rows) >= LEAST_ROWS}


def stream_row(gpu: machine.Machine, row: dict[str, Any]) -> Row:
    moved, rate = row["bytes"], gpu.gpu.memory_bytes_per_s or 1.0
    rows = expected.rows_of(row["shape"], row["direction"])
    return Row(
        (moved, rows.length),
        row["median_s"],
        lambda fitted: analytic.stream_s(moved, 1, rate, fitted, rows),
        moved / rate,
        moved / rate,
    )


def of_one_op(rows: list[Row], fitted: dict[str, float], axes: Any) -> tuple[dict[str, float], list[float]]:
    """Its own parameters, where it has enough rows, and what is left to correct."""
    own = fit(rows, fitted) if len(rows) >= LEAST_OF_ONE_OP else fitted
    return own, grid(rows, [row.model(own) for row in rows], axes) if rows else [0.0] * math.prod(map(len, axes))


def streams(gpu: str, cases: Iterable[dict[str, Any]]) -> tuple[dict[str, float], list[dict[str, Any]], dict[str, Any]]:
    """One small table an op and direction; the parameters are of all of them together."""
    here = machine.find(gpu)
    axes = [steps(10, 34, 4), [8.0, 11.0, 14.0, 17.0]]
    heavy = ("matmul", "linear", "attention", "paged_attention")
    light = [row for row in cases if row.get("bytes") and row.get("bound") in ("memory", "launch")]
    light = [row for row in light if row["op"] not in heavy]
    rows = [(f"stream {row['op']} {row['direction']}", stream_row(here, row)) for row in light]
    known, held = halves(rows)
    fitted = fit([row for _, row in known], START["stream"])
    predicted: list[tuple[float, Row]] = []
    made: list[dict[str, Any]] = []
    for kind in sorted({name for name, _ in rows}):
        of_kind, out, every = ([row for name, row in part if name == kind] for part in (known, held, rows))
        own, values = of_one_op(of_kind, fitted, axes)
        predicted += list(zip(corrected(out, [row.model(own) for row in out], axes, values), out, strict=True))
        own, values = of_one_op(every, fitted, axes)
        made.append(
            {
                "gpu": gpu,
                "architecture": gpus.find(gpu).architecture,
                "kind": kind,
                "axes": axes,
                "values": values,
                "rows": len(every),
                "source": f"benchmarks/{gpu}.json, the fastest provider of each case",
                "parameters": own,
            }
        )
    error = errors([seconds for seconds, _ in predicted], [row for _, row in predicted])
    made = [row | {"median_error": error[0], "p90_error": error[1]} for row in made]
    rest = [row for _, row in held]
    check = {
        "what": f"memory-bound ops, {gpu}",
        "rows": len(rest),
        "table": error,
        "analytic": errors([row.model(fitted) for row in rest], rest),
        "roofline": errors([row.roofline_s for row in rest], rest),
        "viewer": errors([row.viewer_s for row in rest], rest),
    }
    return fitted, made, check


def a100_rows(rows: Sequence[dict[str, str]]) -> list[Row]:
    """The four products of a layer, of one rank."""
    gpu, found = machine.find("a100"), []
    for row in rows:
        tokens, parts, heads, kv_heads, wide, inner = (
            int(row[name]) for name in ("tokens", "tp", "heads", "kv_heads", "d_model", "d_ff")
        )
        width = (heads + 2 * kv_heads) * wide // heads
        shapes = {
            "attn_pre_proj": (width // parts, wide),
            "attn_post_proj": (wide, wide // parts),
            "mlp_up_proj": (2 * inner // parts, wide),
            "mlp_down_proj": (wide, inner // parts),
        }
        for name, (n, k) in shapes.items():
            found.append(product_row(gpu, tokens, n, k, float(row[f"{name}_us"]) * 1e-6))
    return found


def checks_markdown(checks: Iterable[dict[str, Any]]) -> str:
    """The errors as the docs show them."""
    lines = [
        "| rows held out | | measured table | analytic model | pure roofline | LLM-Viewer's formula |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for check in checks:
        cells = [
            f"{100 * check[name][0]:.1f} % · {100 * check[name][1]:.0f} %" if check.get(name) else "–"
            for name in ("table", "analytic", "roofline", "viewer")
        ]
        lines.append(f"| {check['what']} | {check['rows']:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


BEGIN, END = "<!-- errors: begin -->", "<!-- errors: end -->"


def with_checks(page: str, checks: Iterable[dict[str, Any]]) -> str:
    """The page with its table of errors written anew; the rest of it stays."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the page has no {BEGIN} … {END}: it is left as it is")
    return f"{before}{BEGIN}\n{checks_markdown(checks)}\n{END}{after}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("rows", type=Path, help="the folder with the published rows")
    options.add_argument("--docs", type=Path, help="a page whose table of errors is written anew")
    given = options.parse_args()
    h100 = machine.find("h100")
    products = [
        product_row(h100, int(row["m"]), int(row["n"]), int(row["k"]), float(row["us"]) * 1e-6)
        for row in read(given.rows / "gemm_h100.csv")
    ]
    attention = read(given.rows / "attention_h100.csv")
    head_axis = [6.0, 7.0, 8.0]
    groups = {
        "product": (products, [steps(0, 16, 2), steps(5, 17, 2), steps(5, 17, 2)]),
        "prefill attention": (
            [attention_row(h100, row) for row in attention if row["phase"] == "context"],
            [steps(0, 12, 2), steps(4, 16, 2), [0.0, 3.0, 6.0], head_axis],
        ),
        "decode attention": (
            [attention_row(h100, row) for row in attention if row["phase"] == "generation"],
            [steps(0, 12, 2), steps(0, 18, 2), [0.0, 3.0, 6.0], head_axis],
        ),
    }
    fitted: dict[str, Any] = {}
    made: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    for kind, (rows, axes) in groups.items():
        parameters, grids, check = checked(kind, "h100", rows, axes)
        fitted[kind] = {"parameters": parameters, "p90_error": check["analytic"][1]}
        made.append(grids)
        checks.append(check)
        print(checks_markdown([check]).splitlines()[-1], flush=True)
    for gpu, cases in of_runs().items():
        parameters, grids_of_run, check = streams(gpu, cases.values())
        fitted["stream"] = {"parameters": parameters, "p90_error": check["analytic"][1]}
        made += grids_of_run
        checks.append(check)
        for kind, of_kind in rows_of_run(gpu, cases.values()).items():
            parameters, grids, check = checked(kind, gpu, of_kind, groups[kind][1], f"benchmarks/{gpu}.json")
            made.append(grids | {"parameters": parameters})
            checks.append(check)
    rows = a100_rows(read(given.rows / "mlp_vidur_a100.csv"))
    checks.append(
        {
            "what": "product, a100",
            "rows": len(rows),
            "analytic": errors([row.model(fitted["product"]["parameters"]) for row in rows], rows),
            "roofline": errors([row.roofline_s for row in rows], rows),
            "viewer": errors([row.viewer_s for row in rows], rows),
        }
    )
    # the analytic model's error on a GPU that it was not fitted to
    fitted["product"]["p90_error"] = max(fitted["product"]["p90_error"], checks[-1]["analytic"][1])
    fitted["link"] = {"parameters": {}, "p90_error": 0.5}
    note = f"written by benchmarks/predict_fit.py; rows: {SOURCE}; {A100_SOURCE}"
    document = {"note": note, "analytic": fitted, "checks": checks, "tables": made}
    TARGET.write_text(json.dumps(document, indent=None, separators=(",", ":")).replace('{"gpu"', '\n{"gpu"') + "\n")
    print(checks_markdown(checks))
    if given.docs:
        given.docs.write_text(with_checks(given.docs.read_text(encoding="utf-8"), checks), encoding="utf-8")


if __name__ == "__main__":
    main()
