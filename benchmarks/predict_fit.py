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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sublight import gpus
from sublight.predict import machine
from sublight.predict.fit import HEAVY, Row, attention_row, checked, errors, product_row, rows_of_run, streams

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "sublight" / "predict" / "efficiency.json"
SOURCE = (
    "ai-dynamo/aiconfigurator at 095f58a, Apache-2.0: bf16 products by TensorRT-LLM 1.3.0rc20, FlashAttention 3 by "
    "vLLM 0.24.0 with the cache's write, H100 SXM; 3,000 rows of each drawn evenly over the logarithms of the shape"
)
A100_SOURCE = "microsoft/vidur at 7d47513, MIT: fp16 layers of Llama 2 7B and 70B on an A100 80GB, medians of 20"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def of_runs() -> dict[str, dict[tuple[Any, ...], dict[str, Any]]]:
    """The fastest row of each case of this project's own runs, by GPU; of memory-bound ops, this project's kernels."""
    found: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for path in sorted((ROOT / "benchmarks").glob("*.json")):
        if path.name.startswith("predict_check"):  # what predictions are held against is never fitted
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
        source = f"benchmarks/{gpu}.json and {gpu}_streams.json, this project's kernels"
        parameters, grids_of_run, of_streams = streams(here, cases.values(), source)
        fitted["stream"] = {"parameters": parameters, "p90_error": of_streams[0]["analytic"][1]}
        made += grids_of_run
        checks += of_streams
        for kind, of_kind in rows_of_run(here, cases.values()).items():
            parameters, grids, check = checked(kind, here, of_kind, f"benchmarks/{gpu}.json")
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
