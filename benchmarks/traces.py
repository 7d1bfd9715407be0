"""Traces of any size, made up: a transformer trained for as many steps as it takes, as PyTorch's profiler writes it.

    python benchmarks/traces.py trace.json --bytes 63MB            write one
    python benchmarks/traces.py --time 16MB 63MB 252MB             write, explain and time each; CPU seconds

The same seed gives the same file. A step has thousands of kernels: forward and backward of every layer on two threads,
each op with the ops inside it, their shapes, launches, flows and kernels; a loss that is read, an optimizer over lists
of tensors, copies from pinned memory, a collective a layer on a stream of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from sublight import units

PID, MAIN, ENGINE, STREAM, TALK = 4117, 4117, 4188, 7, 20
LAYERS, WIDTH, ROWS = 24, 1024, 8192
LAUNCH_US, KERNEL_US = 4.0, 12.0
GEMM = "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT"
POINTWISE = (
    "void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, "
    "c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int, "
    "at::native::BinaryFunctor<c10::BFloat16>, std::array<char*, 3ul>)"
)
NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, false>(int, float)"
COLLECTIVE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
FOREACH = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<float>"
FORWARD = (  # an op, the ops inside it, the kernel, and its share of KERNEL_US
    ("aten::layer_norm", ("aten::native_layer_norm",), NORM, 1.0),
    ("aten::linear", ("aten::t", "aten::transpose", "aten::addmm"), GEMM, 4.0),
    ("aten::mul", (), POINTWISE, 0.7),
    ("aten::add", (), POINTWISE, 0.7),
    ("aten::gelu", (), POINTWISE, 0.8),
    ("aten::linear", ("aten::t", "aten::transpose", "aten::addmm"), GEMM, 4.0),
    ("aten::dropout", ("aten::native_dropout",), POINTWISE, 0.9),
    ("aten::add", (), POINTWISE, 0.7),
)
BACKWARD = {
    "aten::linear": ("AddmmBackward0", ("aten::mm", "aten::mm", "aten::sum"), GEMM),
    "aten::layer_norm": ("NativeLayerNormBackward0", ("aten::native_layer_norm_backward",), NORM),
    "aten::mul": ("MulBackward0", ("aten::mul", "aten::mul"), POINTWISE),
    "aten::add": ("AddBackward0", (), ""),
    "aten::gelu": ("GeluBackward0", ("aten::gelu_backward",), POINTWISE),
    "aten::dropout": ("NativeDropoutBackward0", ("aten::native_dropout_backward",), POINTWISE),
}


class Writer:
    """The events of one run, in order; knows the host's clock, the streams' and the ids."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 1_000_000.0
        self.free = {STREAM: 0.0, TALK: 0.0}
        self.ids, self.sequence = itertools.count(1), 0

    def us(self, typical: float) -> float:
        return round(typical * self.random.uniform(0.8, 1.25), 3)

    def span(self, cat: str, name: str, ts: float, dur: float, tid: int, args: dict[str, Any], pid: int = PID) -> str:
        head = f'"ph": "X", "cat": "{cat}", "name": {json.dumps(name)}, "pid": {pid}, "tid": {tid},'
        return f'{{\n    {head}\n    "ts": {ts:.3f}, "dur": {dur:.3f},\n    "args": {json.dumps(args)}\n  }}'

    def launch(self, kernel: str, us: float, tid: int, stream: int = STREAM, after: int | None = None) -> Iterator[str]:
        number, call, cost = next(self.ids), self.now, self.us(LAUNCH_US)
        self.now += cost
        start = max(call + 5.0, self.free[stream], self.free[after] if after is not None else 0.0)
        self.free[stream] = start + us
        flow = f'"id": {number}, "cat": "ac2g", "name": "ac2g"'
        ids = {"External id": number, "cbid": 211, "correlation": number}
        yield self.span("cuda_runtime", "cudaLaunchKernel", call, cost, tid, ids)
        yield f'{{\n    "ph": "s", "pid": {PID}, "tid": {tid}, "ts": {call:.3f}, {flow}\n  }}'
        args = {
            "External id": number, "queued": 0, "device": 0, "context": 1, "stream": stream, "correlation": number,
            "registers per thread": 168, "shared memory": 98304, "blocks per SM": 1.9, "warps per SM": 15.5,
            "grid": [256, 1, 1], "block": [256, 1, 1], "est. achieved occupancy %": 12,
        }  # fmt: skip
        yield self.span("kernel", kernel, start, us, stream, args, pid=0)
        yield f'{{\n    "ph": "f", "pid": 0, "tid": {stream}, "ts": {start:.3f}, {flow}, "bp": "e"\n  }}'

    def op(self, name: str, inside: tuple[str, ...], kernel: str, us: float, tid: int, **more: Any) -> list[str]:
        """An op around others, the last of which launches."""
        begun, events = self.now, []
        self.now += self.us(2.0)
        if inside:
            for at, part in enumerate(inside):
                last = at == len(inside) - 1 or part == "aten::mm"
                events += self.op(part, (), kernel if last else "", us / max(inside.count(part), 1), tid)
        elif kernel:
            events += self.launch(kernel, self.us(us), tid)
        self.now += self.us(2.0)
        shape, weight = [ROWS, WIDTH], [WIDTH, WIDTH]
        args = {
            "External id": next(self.ids), "Record function id": 0, **more, "Concrete Inputs": ["", "", "1"],
            "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"], "Input Strides": [[WIDTH, 1], [1, WIDTH], []],
            "Input Dims": [shape, weight if "linear" in name or "mm" in name else shape, []], "Ev Idx": next(self.ids),
        }  # fmt: skip
        return [self.span("cpu_op", name, begun, self.now - begun, tid, args), *events]

    def step(self, number: int) -> list[str]:
        begun, events = self.now, []
        copy = next(self.ids)
        events.append(self.span("cuda_runtime", "cudaMemcpyAsync", self.now, 6.0, MAIN, {"correlation": copy}))
        args = {"device": 0, "stream": STREAM, "correlation": copy, "bytes": 1 << 20, "memory bandwidth (GB/s)": 50.0}
        name = "Memcpy HtoD (Pinned -> Device)"
        events.append(self.span("gpu_memcpy", name, self.now + 5, 20.0, STREAM, args, pid=0))
        self.now += 10.0
        done: list[tuple[str, int]] = []
        for _ in range(LAYERS):
            for name, inside, kernel, share in FORWARD:
                self.sequence += 1
                events += self.op(name, inside, kernel, share * KERNEL_US, MAIN, **{"Sequence number": self.sequence})
                done.append((name, self.sequence))
        for at, (name, sequence) in enumerate(reversed(done)):
            node, inside, kernel = BACKWARD[name]
            around = {"Sequence number": sequence, "Fwd thread id": 1}
            start = self.now
            events += self.op(node, inside, kernel, 1.5 * KERNEL_US, ENGINE, **around)
            name = f"autograd::engine::evaluate_function: {node}"
            events.append(self.span("cpu_op", name, start - 0.5, self.now - start + 1.0, ENGINE, around))
            self.now += 1.5
            if at % len(FORWARD) == len(FORWARD) - 1:
                events += self.launch(COLLECTIVE, 60.0, ENGINE, TALK, STREAM)
        start = self.now
        for _ in range(60):
            events += self.op("aten::_foreach_addcdiv_", (), FOREACH, 40.0, MAIN)
        name = "Optimizer.step#AdamW.step"
        events.append(self.span("user_annotation", name, start - 1, self.now - start + 1, MAIN, {}))
        start = self.now
        self.now += 2.0
        events += self.launch("void at::native::reduce_kernel<512, 1>", 5.0, MAIN)
        waits = self.now
        self.now = max(self.now, self.free[STREAM], self.free[TALK]) + 5.0
        args = {"correlation": next(self.ids)}
        events.append(self.span("cuda_runtime", "cudaStreamSynchronize", waits, self.now - waits, MAIN, args))
        events.append(self.span("cpu_op", "aten::item", start, self.now - start, MAIN, {"External id": next(self.ids)}))
        events.append(self.span("user_annotation", f"ProfilerStep#{number}", begun, self.now - begun, MAIN, {}))
        self.now += 20.0
        return events


def write(path: Path, size_bytes: int, seed: int = 0) -> int:
    """A trace of about this size; gives the number of its steps."""
    writer = Writer(seed)
    with path.open("w", encoding="utf-8") as file:
        _head(file)
        for steps in itertools.count(1):
            file.write(",\n  ".join(writer.step(steps)))
            if file.tell() >= size_bytes:
                break
            file.write(",\n  ")
        file.write('\n  ],\n  "traceName": "made up", "displayTimeUnit": "ms"\n}\n')
    return steps


def _head(file: TextIO) -> None:
    device = {
        "id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_000_000_000, "computeMajor": 9, "computeMinor": 0,
        "numSms": 132,
    }  # fmt: skip
    file.write(f'{{\n  "schemaVersion": 1,\n  "deviceProperties": [{json.dumps(device)}],\n  "traceEvents": [\n  ')


def timed(size_bytes: int, folder: Path) -> dict[str, float]:
    """CPU seconds of a whole `sublight explain`, in a process of its own."""
    path = folder / "trace.json"
    write(path, size_bytes)
    code = (
        "import json, resource, sys; from sublight.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]), file=sys.stderr)"
    )
    words = [sys.executable, "-c", code, "explain", str(path), "--html", str(folder / "page.html")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    cpu_s, memory_bytes = json.loads(done.stderr.strip().splitlines()[-1])
    return {"bytes": path.stat().st_size, "cpu_s": cpu_s, "memory_bytes": memory_bytes}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("path", nargs="?", type=Path, help="the file to write")
    asked.add_argument("--bytes", default="63MB")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--time", nargs="+", metavar="BYTES", help="explain traces of these sizes and print CPU seconds")
    args = asked.parse_args()
    if args.time:
        print("    size    CPU    a MB    memory")
        with tempfile.TemporaryDirectory() as folder:
            for size in args.time:
                row = timed(units.parse_quantity(size), Path(folder))
                rate = units.text(row["cpu_s"] / row["bytes"] * 1e6, "s")
                memory = units.text(row["memory_bytes"], "B")
                print(f"{units.text(row['bytes'], 'B'):>8} {row['cpu_s']:6.2f} s {rate:>8} {memory:>8}")
    elif args.path:
        steps = write(args.path, units.parse_quantity(args.bytes), args.seed)
        print(f"{args.path}: {steps} steps, {units.text(args.path.stat().st_size, 'B')}")
    else:
        asked.error("name a file to write, or sizes to time")


if __name__ == "__main__":
    main()
