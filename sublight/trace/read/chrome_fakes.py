"""A Chrome trace written by hand, as Kineto writes it: something of everything, for tests to load and to break."""

from __future__ import annotations

import json
from typing import Any

PID, MAIN, ENGINE, STREAM = 4117, 4117, 4188, 7
Json = dict[str, Any]
META = {  # what our own captures add
    "version": 1,
    "unprofiled_step_s": [0.000_9, 0.001],
    "steps_from": "optimizer steps",
    "dynamo": {"graph_breaks": {"print": 2}, "compiles_in_window": 1},
    "samples": {
        "frames": [["train.py", "<module>", 7, 1], ["train.py", "f", 3, 2], ["torch/nn/modules/module.py", "g", 9, 8]],
        "stacks": [[0], [0, 1], [0, 2]],
        "threads": ["MainThread"],
        "labels": ["timed"],
        "rows": [[look, 0, look % 3, 10_000_000, 10_000_000, 0] for look in range(12)],
        "look_s": 0.001,
        "mine": [True, True, False],
        "steps": {"timed": 4},
    },
    "sources": {"ops": ["aten::linear"], "index": [0, 0], "source": ["train.py:7 (f)"] * 2, "module": ["Net/fc"] * 2},
}


def span(cat: str, name: str, ts: float, dur: float, *, tid: Any = MAIN, pid: Any = PID, **args: Any) -> Json:
    """An argument's underscores are spaces in the file."""
    named = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": named}


def op(name: str, ts: float, dur: float, *, dims: Any = None, tid: Any = MAIN, **args: Any) -> Json:
    if dims is not None:
        words = ["" if shape else "1" for shape in dims]
        given = {"Input Dims": dims, "Input type": ["float" if shape else "Scalar" for shape in dims]}
        args |= given | {"Input Strides": [[1] * len(shape) for shape in dims], "Concrete Inputs": words}
    return span("cpu_op", name, ts, dur, tid=tid, **args)


def launched(kernel: str, ts: float, at: float, dur: float, number: int, *, tid: Any = MAIN, **more: Any) -> list[Json]:
    """A call, its flow, and its kernel."""
    flow = {"id": number, "cat": "ac2g", "name": "ac2g"}
    sizes = {"grid": [4, 1, 1], "block": [128, 1, 1], "registers_per_thread": 40, "shared_memory": 1024}
    return [
        span("cuda_runtime", "cudaLaunchKernel", ts, 4.0, tid=tid, correlation=number, External_id=number, cbid=211),
        {"ph": "s", **flow, "pid": PID, "tid": tid, "ts": ts},
        {"ph": "f", **flow, "pid": 0, "tid": STREAM, "ts": at, "bp": "e"},
        span(
            "kernel", kernel, at, dur, pid=0, tid=STREAM, device=0, stream=STREAM, correlation=number, **sizes, **more
        ),
    ]


def step(number: int, at: float) -> list[Json]:
    """A millisecond of training: loading, a copy, forward under a module, a wait, backward, a graph, memory."""
    n = number * 100
    copy = {"device": 0, "stream": STREAM, "correlation": n + 1, "bytes": 4096}
    wide, flat = [[64, 128], [256, 128], []], [[64, 256]]
    memory = {"Device Type": 1, "Device Id": 0, "Total Reserved": 1 << 21}
    return [
        span("user_annotation", f"ProfilerStep#{number}", at, 990.0, External_id=n),
        span("user_annotation", "enumerate(DataLoader)#_Iter.__next__", at + 1, 60.0),
        op("aten::copy_", at + 70, 20.0, dims=[[64, 128], [64, 128], []], External_id=n + 1),
        span("cuda_runtime", "cudaMemcpyAsync", at + 72, 15.0, correlation=n + 1),
        span("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", at + 75, 10.0, pid=0, tid=STREAM, **copy),
        span("gpu_memset", "Memset (Device)", at + 92, 1.5, pid=0, tid=STREAM, device=0, stream=STREAM, bytes=64),
        span("python_function", "train.py(7): f", at + 100, 300.0, Python_id=n),
        span("python_function", "nn.Module: Linear_0", at + 105, 200.0),
        op("aten::linear", at + 110, 60.0, dims=wide, External_id=n + 2, Sequence_number=n + 9),
        op("aten::addmm", at + 115, 50.0, dims=[[256], [64, 128], [128, 256], [], []], External_id=n + 3),
        *launched("sm80_xmma_gemm_f32_kernel", at + 120, at + 128, 90.0, n + 3),
        op("aten::relu", at + 180, 20.0, dims=flat, External_id=n + 4),
        *launched("void at::native::vectorized_elementwise_kernel<4>", at + 185, at + 220, 30.0, n + 4),
        *(op(f"Torch-Compiled Region: {part}/0", at + 205 + 20 * part, 15.0) for part in range(4)),
        op("aten::item", at + 310, 80.0, dims=[[]]),
        span("cuda_runtime", "cudaStreamSynchronize", at + 320, 60.0, correlation=n + 5),
        span("cuda_sync", "Stream Sync", at + 320, 60.0, pid=0, tid=STREAM, device=0, stream=STREAM, correlation=n + 5),
        op("autograd::engine::evaluate_function: AddmmBackward0", at + 420, 40.0, tid=ENGINE, Sequence_number=n + 9),
        op("aten::mm", at + 425, 30.0, dims=[[128, 64], [64, 256]], tid=ENGINE, External_id=n + 6),
        *launched("sm80_xmma_gemm_f32_kernel", at + 430, at + 440, 90.0, n + 6, tid=ENGINE),
        span("cuda_runtime", "cudaGraphLaunch", at + 600, 8.0, correlation=n + 7),
        span("kernel", "void graphed()", at + 612, 20.0, pid=0, tid=STREAM, device=0, stream=STREAM, correlation=n + 7,
             graph_node_id=2),
        op("record_param_comms", at + 640, 10.0, dims=[[64]], External_id=n + 8, **{"Collective name": "allreduce"}),
        *launched("ncclDevKernel_AllReduce_Sum_f32", at + 645, at + 660, 50.0, n + 8,
                  **{"Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64, "Group size": 2,
                     "dtype": "Float"}),
        span("gpu_user_annotation", f"ProfilerStep#{number}", at + 75, 700.0, pid=0, tid=STREAM),
        span("overhead", "CUPTI Buffer flush", at + 800, 5.0, tid=-1),
        span("user_annotation", "Optimizer.step#SGD.step", at + 820, 100.0),
        {"ph": "B", "cat": "user_annotation", "name": "by hand", "pid": PID, "tid": MAIN, "ts": at + 930},
        {"ph": "E", "pid": PID, "tid": MAIN, "ts": at + 940},
        {"ph": "i", "s": "t", "name": "[memory]", "pid": PID, "tid": MAIN, "ts": at + 112,
         "args": {**memory, "Bytes": 65_536, "Addr": 140_000_000_000_000 + n, "Total Allocated": 65_536}},
        {"ph": "i", "s": "t", "name": "[memory]", "pid": PID, "tid": MAIN, "ts": at + 950,
         "args": {**memory, "Bytes": -65_536, "Addr": 140_000_000_000_000 + n, "Total Allocated": 0}},
    ]  # fmt: skip


def trace(*, steps: int = 3, start: float = 5_000_000.125) -> Json:
    events: list[Json] = [
        {"name": "process_name", "ph": "M", "ts": start, "pid": PID, "tid": 0, "args": {"name": "python"}},
        {"name": "thread_name", "ph": "M", "ts": start, "pid": PID, "tid": ENGINE, "args": {"name": "pt_autograd_0"}},
    ]
    for number in range(steps):
        events += step(number, start + 1000.0 * number)
    device = {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_000_000_000, "numSms": 132}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{**device, "computeMajor": 9, "computeMinor": 0}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 2},
        "sublight": META,
        "traceEvents": events,
        "traceName": "small.json",
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    }


def text(found: Any = None) -> bytes:
    """The trace as text, laid out as Kineto does."""
    return json.dumps(trace() if found is None else found, indent=1).encode()
