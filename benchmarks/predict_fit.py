"""Fits what `sublight predict` expects of kernels to measured rows, and checks it on rows that were held out.

    python benchmarks/predict_fit.py ROWS [--docs docs/predict.md]
    python benchmarks/predict_fit.py --streams [--docs docs/predict.md]     memory-bound ops alone: the rest stays

ROWS is a folder with gemm_h100.csv, gemm_b200.csv, gemm_l40s.csv, attention_h100.csv and mlp_vidur_a100.csv: published
times of other people's kernels (`SOURCE` and `A100_SOURCE` below say whose), which are not kept in this repository.
Nothing is fitted to those of the A100, B200 and L40S. Rows of this project's own runs are read from benchmarks/*.json:
memory-bound ops, and products (op `matmul`, shape m, n, k) and attention (shape batch, q_len, kv_len, heads, kv_heads,
head_dim, causal) where a run has at least `LEAST_ROWS` of them. Half of the rows, drawn by a fixed seed, fit the
parameters; the other half gives the errors. The tables that are written (sublight/predict/efficiency.json) are of all
rows.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sublight import gpus
from sublight.predict import analytic, machine
from sublight.predict.fit import HEAVY, Row, attention_row, checked, errors, product_row, rates, rows_of_run, streams

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "sublight" / "predict" / "efficiency.json"
SOURCE = (
    "ai-dynamo/aiconfigurator at 095f58a, Apache-2.0: bf16 products by TensorRT-LLM 1.3.0rc20, FlashAttention 3 by "
    "vLLM 0.24.0 with the cache's write, H100 SXM, B200 SXM and L40S; 3,000 rows of each drawn evenly over the "
    "logarithms of the shape"
)
STREAMS_SOURCE = "benchmarks/{gpu}.json, {gpu}_streams.json and {gpu}_census_streams.json, this project's kernels"
COPIES = 5  # of a weight, in SOURCE's rows
L2_BYTES_PER_CLOCK = 32  # that an SM takes from the L2: on an H200 this is 8.4 TB/s, of which 7.9 are reached
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
            if row["op"] not in HEAVY and row.get("provider") != "sublight":
                continue
            if row.get("median_s") and row.get("cache", "cold") == "cold" and row["dtype"] == "bfloat16":
                key = (row["op"], row["direction"], *row["shape"].items())
                if key not in cases or row["median_s"] < cases[key]["median_s"]:
                    cases[key] = row
    return found


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


def published_rows(gpu: machine.Machine, rows: Sequence[dict[str, str]]) -> list[Row]:
    """Products of which up to five copies of the weight took turns: what of them the L2 kept comes at its rate."""
    clock_hz = gpu.gpu.boost_clock_hz or 0.0
    figures = replace(rates(gpu), l2_bytes_per_s=L2_BYTES_PER_CLOCK * (gpu.gpu.sms or 1) * clock_hz)
    found = []
    for row in rows:
        m, n, k = int(row["m"]), int(row["n"]), int(row["k"])
        cold = analytic.cold_share(2.0 * (COPIES * n * k + m * k + m * n), gpu.gpu.l2_bytes or 1)
        found.append(product_row(gpu, m, n, k, float(row["us"]) * 1e-6, cold, figures))
    return found


def elsewhere(folder: Path, product: dict[str, Any]) -> list[dict[str, Any]]:
    """The errors on GPUs that nothing was fitted to, each into `product` as well; a GPU that was not checked has the
    median of their 90th percentiles."""
    found = {"a100": a100_rows(read(folder / "mlp_vidur_a100.csv"))}
    for gpu in ("b200", "l40s"):
        found[gpu] = published_rows(machine.find(gpu), read(folder / f"gemm_{gpu}.csv"))
    checks: list[dict[str, Any]] = [
        {
            "what": f"product, {gpu}",
            "rows": len(rows),
            "analytic": errors([row.model(product["parameters"]) for row in rows], rows),
            "roofline": errors([row.roofline_s for row in rows], rows),
            "viewer": errors([row.viewer_s for row in rows], rows),
        }
        for gpu, rows in found.items()
    ]
    product["p90_of"] = {gpu: check["analytic"][1] for gpu, check in zip(found, checks, strict=True)}
    product["p90_error"] = max(product["p90_error"], statistics.median(product["p90_of"].values()))
    return checks


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
    options.add_argument("--docs", type=Path, help="a page whose table of errors is written anew")
    given = options.parse_args()
    if given.streams:
        return finish(streams_alone(json.loads(TARGET.read_text(encoding="utf-8"))), given.docs)
    if given.rows is None:
        options.error("give the folder with the published rows, or --streams")
    h100 = machine.find("h100")
    products = [
        product_row(h100, int(row["m"]), int(row["n"]), int(row["k"]), float(row["us"]) * 1e-6)
        for row in read(given.rows / "gemm_h100.csv")
    ]
    attention = read(given.rows / "attention_h100.csv")
    groups = {
        "product": products,
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
    checks += elsewhere(given.rows, fitted["product"])
    fitted["link"] = {"parameters": {}, "p90_error": 0.5}
    note = f"written by benchmarks/predict_fit.py; rows: {SOURCE}; {A100_SOURCE}"
    finish({"note": note, "analytic": fitted, "checks": checks, "tables": made}, given.docs)


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
