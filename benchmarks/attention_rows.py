"""Times our attention at the shapes that `predict_rows.py` draws, for `predict`: prefill, and decode over pages of 16.

    python benchmarks/attention_rows.py --json benchmarks/attention_rows_h200.json     240 shapes, a minute
    python benchmarks/attention_rows.py --tiny                                         a few small ones, anywhere

Sizes are spread evenly over their logarithms. Every fifth row is held back (`held_back`): whoever fits anything to the
rows leaves these out, and checks with them. Shapes come in no order, so that a run that ends early (`--limit`) is a
smaller sample of the same. With `--peers` cuDNN runs beside ours, at the same shapes in the same run. With `--jobs`
kernels are compiled in so many processes first, within the limit; `--more` goes on where an earlier run ended.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from sublight import timing
from sublight.predict.rows import cases, cost_of

sys.path.insert(0, str(Path(__file__).parent))
from predict_rows import COMPILE_S, compile_first, this_device

PAGE = 16
HELD_BACK = 5  # one row in so many is held out of the fit
MOST_BYTES = 8 << 30  # the most that one case's sets of buffers take together
KINDS = ("prefill attention", "decode attention")
Shape = dict[str, int]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, help="where to write the rows")
    options.add_argument("--seed", type=int, default=0, help="another one draws other shapes")
    options.add_argument("--limit", type=float, default=100.0, help="seconds after which no further row is begun")
    options.add_argument("--peers", action="store_true", help="cuDNN at the same shapes")
    options.add_argument("--tiny", action="store_true", help="a few small shapes")
    options.add_argument("--more", type=Path, help="keep this file's rows, and leave their shapes out", metavar="FILE")
    options.add_argument("--jobs", type=int, default=0, help="compile kernels in so many processes first")
    options.add_argument("--part", type=int, help=argparse.SUPPRESS)  # of --jobs: this process compiles
    args = options.parse_args()
    began = time.monotonic()
    if args.jobs and args.part is None:
        compile_first(args.jobs)
        print(f"kernels compiled in {time.monotonic() - began:.0f} s", flush=True)
    device, key = this_device()
    try:
        rows: list[dict[str, Any]] = json.loads(args.more.read_text(encoding="utf-8"))["rows"] if args.more else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        options.error(f"cannot read rows from {args.more}: {type(error).__name__}")
    known = [row["shape"] for row in rows]
    drawn = list(enumerate(shapes(args.seed, tiny=args.tiny)))
    left = [(number, kind, shape) for number, (kind, shape) in drawn if shape not in known]
    if args.part is not None:
        for _, kind, shape in left[args.part :: args.jobs]:
            if time.monotonic() - began < COMPILE_S:
                with contextlib.suppress(RuntimeError):  # the run itself says what failed
                    (prefill if kind == KINDS[0] else decode)(shape, device)[1]()
        return
    for done, (number, kind, shape) in enumerate(left):
        if time.monotonic() - began > args.limit:
            print(f"stopped at the limit: {len(drawn) - len(left) + done} of {len(drawn)} shapes")
            break
        for timed in measured(kind, shape, device, peers=args.peers):
            rows.append({**timed, "held_back": number % HELD_BACK == HELD_BACK - 1})
        if args.json and done % 10 == 9:  # saved now and then, whatever happens next
            write(args.json, key, rows)
    if args.json:
        write(args.json, key, rows)
    print(table(rows, key))


def shapes(seed: int, *, tiny: bool = False) -> list[tuple[str, Shape]]:
    """Shapes of prefill and decode, shuffled."""
    drawn = [(kind, shape) for kind, shape in cases(seed, tiny=tiny) if kind in KINDS]
    random.Random(seed).shuffle(drawn)
    return drawn


def measured(kind: str, shape: Shape, device: str, *, peers: bool) -> list[dict[str, Any]]:
    """A row in the format of benchmarks/<gpu>.json for ours, and one for cuDNN where it is wanted and runs."""
    spent = cost_of(kind, shape)
    sets = min(timing.sets_for(spent.bytes, 64 << 20 if device == "cuda" else 1 << 20), 32, MOST_BYTES // spent.bytes)
    makers = {"": prefill if kind == KINDS[0] else decode}
    if peers and kind == KINDS[0]:
        makers["cudnn"] = cudnn
    rows = []
    for name, make in makers.items():
        provider, calls = name, []
        for _ in range(max(1, sets)):
            provider, call = make(shape, device)
            calls.append(call)
        try:
            samples = timing.measure(calls, device=device, time_limit_s=0.06, keep_outputs=False)
        except RuntimeError as error:
            print(f"{kind} {shape} {provider}: {str(error).splitlines()[0]}")
            continue
        rows.append(
            {
                **{"op": "attention" if kind == KINDS[0] else "paged_attention", "direction": "fwd", "shape": shape},
                **{"dtype": "bfloat16", "provider": provider, "ours": not name, "cache": "cold"},
                **{"median_s": samples.median_s, "spread_s": samples.spread_s, "n": samples.n},
                **{"bytes": spent.bytes, "flops": spent.total_flops},
            }
        )
    return rows


def tensors(shape: Shape, device: str) -> tuple[Any, Any, Any]:
    import torch

    def random_of(heads: str, length: str) -> Any:
        size = (shape["batch"], shape[heads], shape[length], shape["head_dim"])
        return torch.randn(size, dtype=torch.bfloat16, device=device)

    return random_of("heads", "q_len"), random_of("kv_heads", "kv_len"), random_of("kv_heads", "kv_len")


def prefill(shape: Shape, device: str) -> tuple[str, Callable[[], Any]]:
    """A call of the ladder's last step that takes the shape; without a GPU PyTorch's, to try the script."""
    from sublight.ops.attention.attention import attention
    from sublight.ops.attention.ladder import why_not

    q, k, v = tensors(shape, device)
    takes = [name for name in ("hopper", "flash") if not why_not(name, q, k, v, causal=True)]
    provider = takes[0] if takes else ""
    return provider or "torch", partial(attention, q, k, v, causal=True, provider=provider)


def cudnn(shape: Shape, device: str) -> tuple[str, Callable[[], Any]]:
    from sublight.ops.attention.attention import ATTENTION

    return "cudnn", ATTENTION.peers["cudnn"](*tensors(shape, device), causal=True)


def decode(shape: Shape, device: str) -> tuple[str, Callable[[], Any]]:
    from sublight.ops.attention.paged_attention import inputs, paged_attention, plan

    x = inputs({**shape, "page": PAGE, "ragged": 0}, "bfloat16", device, 0)
    return plan(*x).provider, partial(paged_attention, *x)


def table(rows: list[dict[str, Any]], key: str) -> str:
    """The median share of the limit that the rows reach, by op and provider."""
    import statistics

    lines = [f"{len(rows)} rows on {key}", f"{'':26} {'rows':>5} {'held back':>9} {'TFLOP/s':>9} {'TB/s':>7}"]
    for op, provider in sorted({(row["op"], row["provider"]) for row in rows}):
        own = [row for row in rows if (row["op"], row["provider"]) == (op, provider)]
        flops = statistics.median(row["flops"] / row["median_s"] for row in own) / 1e12
        rate = statistics.median(row["bytes"] / row["median_s"] for row in own) / 1e12
        held = sum(row["held_back"] for row in own)
        lines.append(f"{op + ' ' + provider:26} {len(own):>5} {held:>9} {flops:>9.3g} {rate:>7.3g}")
    return "\n".join(lines)


def write(path: Path, key: str, rows: list[dict[str, Any]]) -> None:
    import torch

    from sublight.results import write_json

    head = {"gpu": key, "torch": torch.__version__, "date": datetime.now().astimezone().isoformat(timespec="seconds")}
    write_json({**head, "rows": rows}, path)


if __name__ == "__main__":
    main()
