"""Fits what `sublight predict` expects of kernels to measured rows, and checks it on rows that were held out.

    python benchmarks/predict_fit.py ROWS [--docs docs/predict.md]
    python benchmarks/predict_fit.py --streams [--docs docs/predict.md]     memory-bound ops alone: the rest stays
    python benchmarks/predict_fit.py ROWS --elsewhere [--docs docs/predict.md]     errors alone, of what ROWS has of
        GPUs that nothing was fitted to: no parameter and no table changes

ROWS is a folder with gemm_*.csv and attention_*.csv of h100, a100, b200 and l40s, gemm_fp8_*.csv of h100, h200, b200
and l40s, gemm_int4_wo_a100.csv, gemm_int8_wo_a100.csv, gemm_sq_a100.csv and mlp_vidur_a100.csv: published times of
other people's kernels (`SOURCE` and `A100_SOURCE` below say whose), which are not kept in this repository. Nothing is
fitted to those of the A100, B200 and L40S, nor to the H200's. Rows of this project's own runs are read from
benchmarks/*.json: memory-bound ops, and products (op `matmul`, shape m, n, k) and attention (shape batch, q_len,
kv_len, heads, kv_heads, head_dim, causal) where a run has at least `LEAST_ROWS` of them. Half of the rows, drawn by a
fixed seed, fit the parameters; the other half gives the errors. The tables that are written
(sublight/predict/efficiency.json) are of all rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sublight import gpus
from sublight.predict import analytic, expected, machine
from sublight.predict.fit import (
    HEAVY,
    MOST_ERROR,
    Row,
    attention_row,
    checked,
    errors,
    product_row,
    rates,
    rows_of_run,
    streams,
)
from sublight.predict.fit_low_bits import Types, fastest, four_bits, low_bit_row, with_l2
from sublight.predict.table import FEW_BITS

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "sublight" / "predict" / "efficiency.json"
SOURCE = (
    "ai-dynamo/aiconfigurator at 095f58a, Apache-2.0: bf16 products by TensorRT-LLM 1.3.0rc20, FlashAttention 3 by "
    "vLLM 0.24.0 with the cache's write, H100 SXM, B200 SXM and L40S (A100: TensorRT-LLM 1.0.0, vLLM 0.14.0), fp8 "
    "products by TensorRT-LLM 1.3.0rc20 with the scales of their input found at each call, of the H200 as well; 3,000 "
    "rows of each drawn evenly over the logarithms of the shape"
)
STREAMS_SOURCE = "benchmarks/{gpu}.json and {gpu}_*streams.json, this project's kernels"
# Ops whose kernels changed at b216de1: rows from before are of kernels that are gone, and are not fitted. Of norms
# of these widths only the second launch changed, other widths have other tiles; it is little of what moves MANY_BYTES.
CHANGED_ON = "2026-11-19"
BEFORE = ("3ac801b78600", "e104ac0")  # commits of rows in a file that has later ones, too, and their date
SAME_WIDTHS = (768, 1024, 1600, 2048, 2560, 4096, 5120, 8192, 12288, 16384, 32768, 65536)
MANY_BYTES = 256 << 20
TURNED_BY_VECTORS = (2, 4, 8)  # a transpose's elements that are moved at once now, and were one by one
FITTED = ("h100", "h200")  # GPUs whose rows the parameters are fitted to, by halves
COPIES = 5  # of a weight, in SOURCE's rows
A100_SOURCE = "microsoft/vidur at 7d47513, MIT: fp16 layers of Llama 2 7B and 70B on an A100 80GB, medians of 20"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def of_runs() -> dict[str, dict[tuple[Any, ...], dict[str, Any]]]:
    """The fastest row of each case of this project's own runs, by GPU; of memory-bound ops, this project's kernels."""
    found: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for path in sorted((ROOT / "benchmarks").glob("*.json")):
        if "check" in path.name:  # what predictions are held against is never fitted
            continue
        run = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in run["rows"] if "op" in row] if isinstance(run, dict) and "rows" in run else []
        if not rows:
            continue
        cases = found.setdefault(gpus.find(run["gpu"]).key, {})
        for row in rows:
            is_old = row["commit"] in BEFORE if row.get("commit") else run.get("date", "") < CHANGED_ON
            if is_old and is_of_other_kernels(row):
                continue
            if row["op"] not in HEAVY and row.get("provider") != "sublight":
                continue
            if row.get("median_s") and row.get("cache", "cold") == "cold" and row["dtype"] == "bfloat16":
                key = (row["op"], row["direction"], *row["shape"].items())
                if key not in cases or row["median_s"] < cases[key]["median_s"]:
                    cases[key] = row
    return found


def is_of_other_kernels(row: dict[str, Any]) -> bool:
    """Of a row from before CHANGED_ON: its op runs other kernels today.

    >>> norm = {"op": "rms_norm", "direction": "bwd", "shape": {"rows": 5000, "cols": 4096}, "bytes": 3 << 28}
    >>> is_of_other_kernels(norm), is_of_other_kernels(norm | {"bytes": 3 << 20})
    (False, True)
    """
    shape = row["shape"]
    if row["direction"] == "bwd" and row["op"] in (*expected.NORMS, "qk_norm_rope"):
        return bool(row["bytes"] < MANY_BYTES or shape.get("cols", SAME_WIDTHS[0]) not in SAME_WIDTHS)
    if row["op"] == "reduce_sum":
        return bool(shape["inner"] > 1 and shape["n"] > 2 * analytic.COLUMN_ROWS)  # of fewer, one launch takes all
    return row["op"] == "transpose" and math.gcd(16, shape["rows"], shape["cols"]) in TURNED_BY_VECTORS


def a100_rows(gpu: machine.Machine, rows: Sequence[dict[str, str]]) -> list[Row]:
    """The four products of a layer, of one rank."""
    found = []
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


def published_rows(gpu: machine.Machine, rows: Sequence[dict[str, str]]) -> list[Row]:
    """Products of which up to five copies of the weight took turns: what of them the L2 kept comes at its rate."""
    figures = with_l2(gpu, rates(gpu))
    found = []
    for row in rows:
        m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
        cold = analytic.cold_share(2.0 * (COPIES * n * k + m * k + m * n), gpu.gpu.l2_bytes or 1)
        found.append(product_row(gpu, m, n, k, float(row["us"]) * 1e-6, cold, figures))
    return found


def few_bit_rows(types: Types) -> Callable[[machine.Machine, Sequence[dict[str, str]]], list[Row]]:
    """Published products of fewer bits; in fp8 with what rounding the input takes."""
    return lambda gpu, rows: [
        low_bit_row(
            gpu, types, int(row["m"]), int(row["n"]), int(row["k"]), float(row["us"]) * 1e-6, copies=COPIES
        )
        for row in rows
    ]  # fmt: skip


def attention_rows(gpu: machine.Machine, rows: Sequence[dict[str, str]]) -> list[Row]:
    """Those whose tensors the L2 cannot keep: a benchmark runs the same ones again and again, a model does not."""
    found = []
    for row in rows:
        batch, queries, keys, heads, kv_heads, head_dim = (
            int(row[name]) for name in ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim")
        )
        touched = 4.0 * batch * head_dim * (queries * heads + keys * kv_heads)  # q and the result, k and v
        if analytic.cold_share(touched, gpu.gpu.l2_bytes or 1) == 1.0:
            found.append(attention_row(gpu, row))
    return found


def of_phase(phase: str) -> Callable[[machine.Machine, Sequence[dict[str, str]]], list[Row]]:
    return lambda gpu, rows: attention_rows(gpu, [row for row in rows if row["phase"] == phase])


IN_FP8 = Types(products="float8_e4m3fn", weights="float8_e4m3fn")
ELSEWHERE = (  # name in the table of errors, kind, GPU, file, how its rows are read
    ("product, a100", "product", "a100", "mlp_vidur_a100.csv", a100_rows),
    ("product, a100, TensorRT-LLM", "product", "a100", "gemm_a100.csv", published_rows),
    *((f"product, {gpu}", "product", gpu, f"gemm_{gpu}.csv", published_rows) for gpu in ("b200", "l40s")),
    *(
        (f"product fp8, {gpu}", "product fp8", gpu, f"gemm_fp8_{gpu}.csv", few_bit_rows(IN_FP8))
        for gpu in ("h200", "b200", "l40s")
    ),
    *(
        (f"product few bits, a100, {words}", FEW_BITS, "a100", f"gemm_{file}_a100.csv", few_bit_rows(types))
        for words, file, types in (
            ("int4 weights", "int4_wo", Types(weights="int4")),
            ("int8 weights", "int8_wo", Types(weights="int8")),
            ("int8", "sq", Types(products="int8", weights="int8")),
        )
    ),
    *(
        (f"{kind}, {gpu}", kind, gpu, f"attention_{gpu}.csv", of_phase(phase))
        for kind, phase in (("prefill attention", "context"), ("decode attention", "generation"))
        for gpu in ("a100", "b200", "l40s")
    ),
)


def elsewhere(folder: Path, fitted: dict[str, Any], before: list[dict[str, Any]], *, partly: bool) -> list[Any]:
    """The errors on GPUs that nothing was fitted to, behind those of `before`; `partly`: of the files that are there.

    Each goes into `fitted` as well, the largest of a kind and a GPU. A GPU that was not checked has the median of
    these, and no less than the H100.
    """
    checks = {check["what"]: check for check in before}
    for what, kind, gpu, file, rows_of in ELSEWHERE:
        if partly and not (folder / file).exists():
            continue
        rows, parameters = rows_of(machine.find(gpu), read(folder / file)), fitted[kind]["parameters"]
        checks[what] = {
            "what": what,
            "rows": len(rows),
            "analytic": errors([row.model(parameters) for row in rows], rows),
            "roofline": errors([row.roofline_s for row in rows], rows),
            "viewer": errors([row.viewer_s for row in rows], rows),
        }
    for kind in dict.fromkeys(kind for _, kind, *_ in ELSEWHERE):
        worst: dict[str, float] = {}
        for what, of_kind, gpu, *_ in ELSEWHERE:
            if of_kind == kind and what in checks:
                worst[gpu] = max(worst.get(gpu, 0.0), min(checks[what]["analytic"][1], MOST_ERROR))
        fitted_to = {gpu: checks[f"{kind}, {gpu}"]["analytic"][1] for gpu in FITTED if f"{kind}, {gpu}" in checks}
        known = [*fitted_to.values(), *([statistics.median(worst.values())] if worst else [])]
        fitted[kind] |= {"p90_of": fitted_to | worst, "p90_error": max(known)}
    return list(checks.values())


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
    options.add_argument("rows", type=Path, nargs="?", help="the folder with the published rows")
    options.add_argument("--streams", action="store_true", help="fit memory-bound ops alone; other tables stay")
    options.add_argument("--elsewhere", action="store_true", help="only the errors on GPUs that nothing was fitted to")
    options.add_argument("--docs", type=Path, help="a page whose table of errors is written anew")
    given = options.parse_args()
    if given.streams:
        return finish(streams_alone(json.loads(TARGET.read_text(encoding="utf-8"))), given.docs)
    if given.rows is None:
        options.error("give the folder with the published rows, or --streams")
    if given.elsewhere:
        document = json.loads(TARGET.read_text(encoding="utf-8"))
        document["checks"] = elsewhere(given.rows, document["analytic"], document["checks"], partly=True)
        return finish(document, given.docs)
    h100 = machine.find("h100")
    attention = read(given.rows / "attention_h100.csv")
    groups = {
        "product": published_rows(h100, read(given.rows / "gemm_h100.csv")),
        "product fp8": few_bit_rows(IN_FP8)(h100, read(given.rows / "gemm_fp8_h100.csv")),
        "prefill attention": [attention_row(h100, row) for row in attention if row["phase"] == "context"],
        "decode attention": [attention_row(h100, row) for row in attention if row["phase"] == "generation"],
    }
    fitted: dict[str, Any] = {}
    made: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    for kind, of_kind in groups.items():
        parameters, grids, check = checked(kind, h100, of_kind, SOURCE)
        fitted[kind] = {"parameters": parameters, "p90_error": check["analytic"][1]}
        made.append(grids)
        checks.append(check)
        print(checks_markdown([check]).splitlines()[-1], flush=True)
    for gpu, cases in of_runs().items():
        here = machine.find(gpu)
        parameters, grids_of_run, of_streams = streams(here, cases.values(), STREAMS_SOURCE.format(gpu=gpu))
        fitted["stream"] = {"parameters": parameters, "p90_error": of_streams[0]["analytic"][1]}
        made += grids_of_run
        checks += of_streams
        for kind, of_kind in rows_of_run(here, cases.values()).items():
            parameters, grids, check = checked(kind, here, of_kind, f"benchmarks/{gpu}.json")
            made.append(grids | {"parameters": parameters})
            checks.append(check)
    of_four, check = four_bits_of_h200({row["kind"]: row for row in made if row["gpu"] == "h200"})
    made.append(of_four)
    checks.append(check)
    fitted[FEW_BITS] = {"parameters": fitted["product"]["parameters"]}
    checks = elsewhere(given.rows, fitted, checks, partly=False)
    fitted["link"] = {"parameters": {}, "p90_error": 0.5}
    note = f"written by benchmarks/predict_fit.py; rows: {SOURCE}; {A100_SOURCE}"
    finish({"note": note, "analytic": fitted, "checks": checks, "tables": made}, given.docs)


def four_bits_of_h200(made: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of this project's kernels, fitted from where its products in 16 bits lie."""
    run = json.loads((ROOT / "benchmarks" / "products_h200.json").read_text(encoding="utf-8"))
    rows = fastest([*run["low-bit"], *run["low-bit tuning"]])
    return four_bits(machine.find("h200"), rows, made["product"]["parameters"], "benchmarks/products_h200.json")


def streams_alone(document: dict[str, Any]) -> dict[str, Any]:
    """The document with memory-bound ops fitted anew."""
    for gpu, cases in of_runs().items():
        parameters, made, checks = streams(machine.find(gpu), cases.values(), STREAMS_SOURCE.format(gpu=gpu))
        document["analytic"]["stream"] = {"parameters": parameters, "p90_error": checks[0]["analytic"][1]}
        kept = [row for row in document["tables"] if row["gpu"] != gpu or not row["kind"].startswith("stream ")]
        document["tables"] = kept + made
        anew = {check["what"]: check for check in checks}
        document["checks"] = [anew.get(check["what"], check) for check in document["checks"]]
    return document


def finish(document: dict[str, Any], docs: Path | None) -> None:
    """Write the tables, and the page's table of errors."""
    TARGET.write_text(json.dumps(document, indent=None, separators=(",", ":")).replace('{"gpu"', '\n{"gpu"') + "\n")
    print(checks_markdown(document["checks"]))
    if docs:
        docs.write_text(with_checks(docs.read_text(encoding="utf-8"), document["checks"]), encoding="utf-8")


if __name__ == "__main__":
    main()
