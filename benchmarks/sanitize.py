"""Kernels under compute-sanitizer, at odd sizes: does any read or write outside of its tensors, do any two race?

    python benchmarks/sanitize.py products attention rows [--tool memcheck|racecheck|initcheck] [--jobs 12]

It starts itself under compute-sanitizer, which slows kernels down a hundredfold: so sizes are small, and each kernel
runs once. After `--limit` seconds no further launch is begun, GRACE_S later what still runs is ended, and the last
lines say which launch that was and how many were left out: a minute or two on an H200 with twelve processes.
Exit status 0: clean; 1: something was found, printed as compute-sanitizer says it, or the time was up; 2: no
compute-sanitizer or no GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

SIZES = ((1, 65, 700), (17, 129, 63), (130, 257, 136))
FOUND = 9  # the exit status that compute-sanitizer is told to use when it has found something
GRACE_S = 15.0  # how long a launch may go on after the limit
BANNER = "COMPUTE-SANITIZER"
BEGUN = "launch: "
DONE = "launches, and left out:"
OURS_ALONE = ("--kernel-regex-exclude", "kns=2at6native")  # leaves out PyTorch's own kernels


def products() -> Iterator[tuple[str, Any]]:
    """A name and a call for each provider of each product, at each size that it takes."""
    import torch

    from sublight.backend.device import facts
    from sublight.ops.matmul import tiles
    from sublight.ops.matmul.grouped_matmul import GROUPED_MATMUL
    from sublight.ops.matmul.low_bit_matmul import LOW_BIT_MATMUL
    from sublight.ops.matmul.matmul import MATMUL
    from sublight.ops.matmul.scaled_matmul import SCALED_MATMUL
    from sublight.ops.moe.moe_experts import MOE_EXPERTS
    from sublight.ops.sparse.sparsify_24 import SPARSIFY_24

    for m, n, k in SIZES:
        shape = {"m": m, "n": n, "k": k}
        made = {"device": "cuda", "dtype": torch.bfloat16}
        more = (torch.randn(n, **made), torch.randn(m, n, **made), "gelu")
        yield from _of(MATMUL, shape, "bfloat16", *more)
        for block in (0, 128):
            yield from _of(SCALED_MATMUL, {**shape, "block": block}, "float8_e4m3fn")
    split = tiles.Split(tile=next(iter(tiles.PERSISTENT)), pieces=3)

    def in_pieces(*args: Any) -> None:
        token = tiles.TRIED_SPLIT.set(split)
        try:
            MATMUL.providers["split_k"].launch(*args)
        finally:
            tiles.TRIED_SPLIT.reset(token)

    if facts(torch.empty(0, device="cuda")).capability == 90:
        inputs = MATMUL.inputs({"m": 130, "n": 300, "k": 1000}, "bfloat16", "cuda", 0)
        yield "matmul split_k in pieces", lambda: in_pieces(*inputs)
    for op in (LOW_BIT_MATMUL, GROUPED_MATMUL, MOE_EXPERTS, SPARSIFY_24):
        for shape in op.test_shapes:
            yield from _of(op.at(shape), shape, "bfloat16")


def attention() -> Iterator[tuple[str, Any]]:
    """A name and a call for each provider of each op of attention, forward and backward."""
    import torch

    from sublight.ops import OPS
    from sublight.ops.attention.attention import ATTENTION, launch_backward

    keys = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal")
    for size in ((1, 2, 1, 129, 257, 128, 1), (2, 2, 2, 130, 65, 64, 0), (1, 4, 2, 20, 129, 80, 1)):
        shape = dict(zip(keys, size, strict=True))
        yield from _of(ATTENTION, shape, "bfloat16")
        q, k, v = ATTENTION.inputs(shape, "bfloat16", "cuda", 0)
        for name, provider in ATTENTION.providers.items():
            if provider.backward and not provider.why_not(q, k, v):
                yield (
                    f"attention {name} backward {shape}",
                    lambda name=name, q=q, k=k, v=v: launch_backward(
                        torch.randn_like(q), q, k, v, causal=True, provider=name
                    ),
                )
        for number, variant in enumerate(ATTENTION.providers["flash"].variants):
            yield f"attention flash, extras {number} {shape}", lambda variant=variant, q=q, k=k, v=v: variant(q, k, v)
    for op in OPS:
        if op.reference.__module__.startswith("sublight.ops.attention.") and op is not ATTENTION:
            for shape in op.test_shapes[1:3]:
                yield from _of(op.at(shape), shape, "bfloat16")


def rows() -> Iterator[tuple[str, Any]]:
    """Every other op: each provider, and its backward pass, at the sizes of its tests."""
    from sublight import correct
    from sublight.ops import OPS

    others = ("sublight.ops.attention.", "sublight.ops.matmul.", "sublight.ops.moe.", "sublight.ops.sparse.")
    for op in OPS:
        if op.reference.__module__.startswith(others):
            continue
        dtype = "bfloat16" if "bfloat16" in op.dtypes else next(iter(op.dtypes))
        for shape in op.test_shapes:
            at = op.at(shape)
            yield from _of(at, shape, dtype)
            if at.launch_backward:
                inputs = at.inputs(shape, dtype, "cuda", 0)
                grads = correct.random_grads(at.reference, inputs, wrt=at.wrt)
                yield f"{op.name} backward {shape}", partial(at.launch_backward, *grads, *inputs)


GROUPS = {"products": products, "attention": attention, "rows": rows}


def _of(op: Any, shape: Any, dtype: str, *more: Any) -> Iterator[tuple[str, Any]]:
    inputs = op.inputs(shape, dtype, "cuda", 0)
    for name, provider in op.providers.items():
        if not provider.why_not(*inputs):
            yield f"{op.name} {name} {shape}", lambda provider=provider: provider.launch(*inputs, *more)


def launch_all(groups: Sequence[str], share: int, shares: int, limit_s: float) -> None:
    """Inside of compute-sanitizer: one launch of `shares`; the last line counts them."""
    import torch

    begin, done, left = time.monotonic(), 0, 0
    for number, (name, call) in enumerate(each for group in groups for each in GROUPS[group]()):
        if number % shares != share:
            continue
        if time.monotonic() - begin > limit_s:
            left += 1
            continue
        print(BEGUN + name, flush=True)
        call()
        torch.cuda.synchronize()
        done += 1
    print(f"{DONE} {done} {left}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("groups", nargs="+", choices=GROUPS, metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--tool", default="memcheck", choices=("memcheck", "racecheck", "initcheck"))
    parser.add_argument("--limit", type=float, default=100.0, metavar="S", help="begin no launch after S seconds")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes, which share the launches")
    parser.add_argument("--share", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.share >= 0:
        launch_all(args.groups, args.share, args.jobs, args.limit)
        return 0
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        print("no compute-sanitizer here: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("sanitize.py launches kernels on a GPU, and torch finds none here", file=sys.stderr)
        return 2
    options = [f"--tool={args.tool}", f"--error-exitcode={FOUND}", "--print-limit=20", *OURS_ALONE]
    inside = [sys.executable, __file__, *args.groups, f"--limit={args.limit}", f"--jobs={args.jobs}"]
    with tempfile.TemporaryDirectory() as folder:
        return _watch(
            [[sanitizer, *options, *inside, f"--share={share}"] for share in range(args.jobs)], args, folder
        )


def _watch(commands: Sequence[Sequence[str]], args: argparse.Namespace, folder: str) -> int:
    """Run `commands` at once, end what is late, print what they found and a last line of counts."""
    paths = [Path(folder, str(share)) for share in range(len(commands))]
    runs = []
    for command, path in zip(commands, paths, strict=True):
        with path.open("w") as file:
            runs.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True))
    deadline = time.monotonic() + args.limit + GRACE_S
    late = []
    for run, path in zip(runs, paths, strict=True):
        try:
            run.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)  # compute-sanitizer and the Python under it
            run.wait()
            late.append(run)
            under_way = [line for line in path.read_text().splitlines() if line.startswith(BEGUN)][-1:]
            print(f"ended after {args.limit + GRACE_S:g} s, during: {''.join(under_way) or 'its start'}")
    done = left = failed = 0
    for run, path in zip(runs, paths, strict=True):
        output = path.read_text()
        counts = [line.split()[-2:] for line in output.splitlines() if line.startswith(DONE)]
        begun = sum(line.startswith(BEGUN) for line in output.splitlines())
        done += sum(int(n) for n, _ in counts) if counts else max(0, begun - 1)
        left += sum(int(n) for _, n in counts)
        reports = [line for line in output.splitlines() if line.startswith("=====") and BANNER not in line]
        if reports if run in late else run.returncode or not counts:
            failed += 1
            print(output)
    verdict = f"{failed} of {len(runs)} processes found something, or failed" if failed else "nothing found"
    if not failed and not late:
        verdict = "clean"
    unfinished = f", {len(late)} of {len(runs)} processes did not end in time" if late else ""
    print(f"{args.tool}: {done} launches of {', '.join(args.groups)}, {left} left out{unfinished}: {verdict}")
    return 1 if failed or late else 0


if __name__ == "__main__":
    sys.exit(main())
