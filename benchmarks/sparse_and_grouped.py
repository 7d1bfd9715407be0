"""Grouped and sparse products, mixtures of experts and 8-bit layers on this GPU: right first, then timed against peers.

    python benchmarks/sparse_and_grouped.py moe sparse eight-bit --json sparse_and_grouped.json
    python benchmarks/sparse_and_grouped.py tiles          which tile the grouped products want, about a minute

`moe` is the layer at Qwen3-30B's and Mixtral's shapes against PyTorch's own grouped product and its loop over experts;
`sparse` is 2:4 against the dense product, and the packing of W and its transpose; `eight-bit` the layers that
`sublight.quantize(model, "w8a8" | "fp8")` makes. The file is written after each part. `--device cpu --quick` tries the
script itself on small shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from sublight import bench, correct, timing
from sublight.fix.quantize.coded import CodedLinear, Kind
from sublight.fix.sparsify.linear import SparseLinear
from sublight.ops.matmul import grouped_matmul as grouped
from sublight.ops.matmul.grouped_matmul import GROUPED_MATMUL, GroupTile
from sublight.ops.moe.moe_experts import MOE_EXPERTS
from sublight.ops.sparse.sparsify_24 import SPARSIFY_24

Row = dict[str, Any]
LEAST_TIME_S = 0.06
QUICK = {"tokens": 24, "hidden": 32, "inner": 16, "experts": 4, "top_k": 2}
TILES = (
    GroupTile(128, 256, 128, 8, 4),
    GroupTile(128, 256, 128, 8, 3),
    GroupTile(128, 128, 128, 4, 3),
    GroupTile(64, 256, 128, 4, 2),
)
GATED_TILES = (GroupTile(128, 128, 128, 8, 4), GroupTile(128, 128, 128, 8, 3), GroupTile(64, 128, 128, 4, 2))
WEIGHTS_TILES = (GroupTile(64, 128, 128, 4, 3), GroupTile(128, 128, 128, 8, 3), GroupTile(128, 256, 128, 8, 3))


def seconds(call: Callable[..., Any], device: str) -> float | None:
    """Of one call, replayed from a graph on a GPU; None where it does not run, with the reason on stderr."""
    try:
        return timing.measure(call, device=device, time_limit_s=LEAST_TIME_S, keep_outputs=False).median_s
    except Exception as error:  # a peer that is not built for this GPU, a tile that does not fit
        print(f"  left out: {type(error).__name__}: {str(error).splitlines()[0][:120]}", file=sys.stderr)
        return None


def row(title: str, shape: str, flops: float, by: dict[str, float | None], is_right: bool | None = None) -> Row:
    """Printed as it comes: time and rate of each way."""
    times = "  ".join(
        f"{name} {time_s * 1e6:.1f} µs {flops / time_s / 1e12:.0f} TFLOP/s" if time_s else f"{name} -"
        for name, time_s in by.items()
    )
    verdict = "" if is_right is None else "right  " if is_right else "WRONG  "
    print(f"{title:<22} {shape:<28} {verdict}{times}", flush=True)
    return {"what": title, "shape": shape, "flops": flops, "right": is_right, "seconds": by}


def torchs_grouped(x: Any, index: Any, weights: Any, gate_up: Any, down: Any) -> Any:
    """With PyTorch's sort and its own grouped product; no wait for the device either."""
    by_expert, order = index.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(gate_up.shape[0], device=x.device), right=True).int()
    token = order // index.shape[1]
    gate, up = torch._grouped_mm(x[token], gate_up.mT, offs=ends).chunk(2, -1)
    out = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    return torch.zeros_like(x).index_add(0, token, (out * weights.flatten()[order, None]).to(x.dtype))


def moe(device: str, quick: bool) -> Iterator[Row]:
    for shape in (QUICK,) if quick else MOE_EXPERTS.shapes:
        words = "x".join(str(size) for size in shape.values())
        small = {**shape, "tokens": min(shape["tokens"], 256)}
        for dtype in ("float32",) if quick else ("bfloat16", "float16"):
            inputs = MOE_EXPERTS.inputs(small, dtype, device, 1)
            grads = correct.random_grads(MOE_EXPERTS.reference, inputs, wrt=MOE_EXPERTS.wrt)
            errors = correct.forward_errors(MOE_EXPERTS.launch, MOE_EXPERTS.reference, inputs)
            backward = MOE_EXPERTS.launch_backward
            assert backward is not None
            errors += correct.backward_errors(backward, MOE_EXPERTS.reference, inputs, grads, wrt=MOE_EXPERTS.wrt)
            is_right = all(error.ok for error in errors)
            inputs = MOE_EXPERTS.inputs(shape, dtype, device, 0)
            flops = MOE_EXPERTS.cost(shape, dtype, "fwd").total_flops
            with torch.no_grad():
                by = {"sublight": seconds(lambda inputs=inputs: MOE_EXPERTS.launch(*inputs), device)}
                by["torch grouped_mm"] = seconds(lambda inputs=inputs: torchs_grouped(*inputs), device)
            yield row(f"moe fwd {dtype}", words, flops, by, is_right)
            dy = torch.randn_like(inputs[0])
            ours = seconds(lambda dy=dy, inputs=inputs, backward=backward: backward(dy, *inputs), device)
            yield row(f"moe fwd + bwd {dtype}", words, 3 * flops, {"sublight": ours})


def tiles(device: str, quick: bool) -> Iterator[Row]:
    """Each tile on each grouped shape, for the gradient of the weights, and for the gated product of a whole layer."""
    shapes = ({"m": 70, "n": 32, "k": 64, "groups": 3},) if quick else GROUPED_MATMUL.shapes
    dtype = "float16" if quick else "bfloat16"
    for shape in shapes:
        a, b, ends = GROUPED_MATMUL.inputs(shape, dtype, device, 0)
        dc = torch.randn(shape["m"], shape["n"], device=device).to(a.dtype)
        by = {} if quick else {"torch": seconds(lambda a=a, b=b, ends=ends: torch._grouped_mm(a, b, offs=ends), device)}
        for tile in TILES[:1] if quick else TILES:
            with tried("ENGINE_TILE", tile):
                by[words_of(tile)] = seconds(lambda a=a, b=b, ends=ends: GROUPED_MATMUL.launch(a, b, ends), device)
        for tile in WEIGHTS_TILES[:1] if quick else WEIGHTS_TILES:
            with tried("WEIGHTS_TILE", tile):
                by[f"weights {words_of(tile)}"] = seconds(
                    lambda a=a, dc=dc, e=ends: grouped._grouped_weights.by_kernels(a, dc, e, False), device
                )
        flops = GROUPED_MATMUL.cost(shape, "bfloat16", "fwd").total_flops
        yield row("grouped", "x".join(map(str, shape.values())), flops, by)
    for shape in (QUICK,) if quick else MOE_EXPERTS.shapes[:2]:
        inputs = MOE_EXPERTS.inputs(shape, dtype, device, 0)
        by = {}
        for tile in GATED_TILES[:1] if quick else GATED_TILES:
            with tried("GATED_TILE", tile):
                by[words_of(tile)] = seconds(lambda inputs=inputs: MOE_EXPERTS.launch(*inputs), device)
        flops = MOE_EXPERTS.cost(shape, "bfloat16", "fwd").total_flops
        yield row("layer by gated tile", "x".join(map(str, shape.values())), flops, by)


@contextlib.contextmanager
def tried(name: str, tile: GroupTile) -> Iterator[None]:
    before = getattr(grouped, name)
    setattr(grouped, name, tile)
    try:
        yield
    finally:
        setattr(grouped, name, before)


def words_of(tile: GroupTile) -> str:
    return f"{tile.rows}x{tile.cols} {tile.warps} warps {tile.stages} stages"


def sparse(device: str, quick: bool) -> Iterator[Row]:
    for shape in SPARSIFY_24.test_shapes[:2] if quick else SPARSIFY_24.shapes:
        op = SPARSIFY_24.at(shape)
        inputs = op.inputs(shape, "float32" if quick else "bfloat16", device, 0)
        pairs = zip(op.launch(*inputs), op.reference(*inputs), strict=True)
        is_right = all(torch.equal(ours, theirs) for ours, theirs in pairs)
        moved = op.cost(shape, "bfloat16", "fwd").bytes
        time_s = seconds(lambda op=op, inputs=inputs: op.launch(*inputs), device)
        rate = f"{moved / time_s / 1e12:.2f} TB/s" if time_s else ""
        by = {"sublight": time_s}
        yield row("sparsify_24", f"{shape['rows']}x{shape['cols']} both={shape['both']} {rate}", 0.0, by, is_right)
    for m, n, k in ((8, 32, 64),) if quick else ((8192, 8192, 8192), (4096, 14336, 4096), (64, 14336, 4096)):
        kind = torch.float32 if quick else torch.bfloat16
        layer = torch.nn.Linear(k, n, bias=False, device=device, dtype=kind)
        x = torch.randn(m, k, device=device, dtype=kind)
        new = SparseLinear(layer.weight, None)
        with torch.no_grad():
            truth, theirs = F.linear(x.double(), new.dense.double()), F.linear(x, new.dense)
            is_right = correct.error("sparse", new(x), theirs, truth).ok
            del truth, theirs
            by = {
                "dense": seconds(lambda layer=layer, x=x: layer(x), device),
                new.why or "sparse": seconds(lambda new=new, x=x: new(x), device),
            }
        yield row("2:4 product", f"{m}x{n}x{k}", 2.0 * m * n * k, by, is_right)


def eight_bit(device: str, quick: bool) -> Iterator[Row]:
    for m, n, k in ((8, 32, 64),) if quick else ((8192, 8192, 8192), (2048, 14336, 4096), (256, 4096, 4096)):
        dtype = torch.float32 if quick else torch.bfloat16
        layer = torch.nn.Linear(k, n, bias=False, device=device, dtype=dtype)
        x = torch.randn(m, k, device=device, dtype=dtype)
        kinds: tuple[Kind, ...] = ("int8", "fp8")
        layers = {kind: CodedLinear.of(layer.weight, None, kind) for kind in kinds}
        with torch.no_grad():
            by = {"dense": seconds(lambda layer=layer, x=x: layer(x), device)}
            by |= {kind: seconds(lambda new=new, x=x: new(x), device) for kind, new in layers.items()}
            dense = layer(x).float()
            off = {kind: float((new(x).float() - dense).norm() / dense.norm()) for kind, new in layers.items()}
        words = ", ".join(f"{kind} off by {share:.1%}" for kind, share in off.items())
        yield row("8-bit layers", f"{m}x{n}x{k} {words}", 2.0 * m * n * k, by)


PARTS: dict[str, Callable[[str, bool], Iterator[Row]]] = {
    "moe": moe,
    "sparse": sparse,
    "eight-bit": eight_bit,
    "tiles": tiles,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--json", default="", metavar="FILE", help="write all rows there, after each part")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="small shapes: tries the script, measures nothing")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here: --device cpu --quick tries the script with TRITON_INTERPRET=1")
    if args.device == "cpu" and not args.quick:
        parser.error("on a CPU only --quick makes sense")
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    run: dict[str, Any] = {"gpu": name, "torch": torch.__version__, "commit": bench.commit(), "rows": []}
    for part in args.parts:
        for each in PARTS[part](args.device, args.quick):
            run["rows"].append({"part": part, **each})
        if args.json:
            Path(args.json).write_text(json.dumps(run, indent=1) + "\n")
    if any(each["right"] is False for each in run["rows"]):
        sys.exit("some rows are WRONG")


if __name__ == "__main__":
    main()
