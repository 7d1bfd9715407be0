"""A Chrome trace as XLA's profiler writes it for JAX: no categories, labels that tell them, an empty event last."""

from __future__ import annotations

import json
from typing import Any

HOST, DEVICE, PYTHON = 701, 1, 4117
Json = dict[str, Any]


def label(what: str, pid: int, name: str, tid: int | None = None) -> Json:
    return {"ph": "M", "pid": pid, **({"tid": tid} if tid is not None else {}), "name": what, "args": {"name": name}}


def span(name: str, pid: int, tid: int, ts: float, dur: float, **args: Any) -> Json:
    return {"ph": "X", "pid": pid, "tid": tid, "ts": ts, "dur": dur, "name": name, "args": args}


def step(number: int, at: float) -> list[Json]:
    """2 ms: a copy, two kernels of one jitted function, a collective, a wait; and the groups that XLA draws of them."""
    n = 10 * number
    path = "jit(train_step)/transformer/mlp/dot_general"
    kernel = {"context_id": "$$1", "hlo_module": "jit_train_step", "tf_op": path, "source": "/home/me/train.py:41"}
    return [
        span("train", HOST, PYTHON, at, 1990.0, step_num=str(number)),
        span("$train.py:88 main", HOST, PYTHON, at + 1, 1980.0),
        span("PjitFunction(train_step)", HOST, PYTHON, at + 10, 300.0),
        span("cuMemcpyHtoDAsync", HOST, PYTHON, at + 20, 8.0, correlation_id=str(n)),
        span("cuLaunchKernel", HOST, PYTHON, at + 100, 5.0, correlation_id=str(n + 1)),
        span("cuLaunchKernel", HOST, PYTHON, at + 120, 5.0, correlation_id=n + 2),
        span("cuLaunchKernelEx", HOST, PYTHON, at + 140, 5.0, correlation_id=str(n + 3)),
        span("cuStreamSynchronize", HOST, PYTHON, at + 320, 1600.0),
        span("MemcpyH2D", DEVICE, 14, at + 30, 50.0, correlation_id=str(n),
             memcpy_details="kind_src:pageable kind_dst:device size:65536 dest:0 async:1"),
        span("gemm_fusion_dot_general_7", DEVICE, 13, at + 110, 800.0, correlation_id=str(n + 1),
             hlo_op="gemm_fusion_dot_general.7",
             kernel_details="regs:226 static_shared:0 dynamic_shared:98304 grid:128,1,1 block:256,1,1", **kernel),
        span("loop_add_fusion_3", DEVICE, 13, at + 910, 400.0, correlation_id=str(n + 2), hlo_op="loop_add_fusion.3",
             kernel_details="regs:16 static_shared:0 dynamic_shared:0 grid:4096,1,1 block:128,1,1", **kernel),
        span("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", DEVICE, 15, at + 1310, 600.0, correlation_id=str(n + 3)),
        span("jit_train_step", DEVICE, 20, at + 110, 1800.0, run_id=str(number)),
        span("gemm_fusion_dot_general.7", DEVICE, 21, at + 110, 800.0, hlo_op="gemm_fusion_dot_general.7"),
        span("transformer", DEVICE, 22, at + 110, 1200.0),
    ]  # fmt: skip


def trace(steps: int = 3, start: float = 1000.0) -> Json:
    threads = {13: "Stream #13(Compute)", 14: "Stream #14(MemcpyH2D)", 15: "Stream #15(Compute)", 20: "XLA Modules"}
    threads |= {21: "XLA Ops", 22: "Framework Name Scope"}
    events = [
        label("process_name", DEVICE, "/device:GPU:0"),
        *(label("thread_name", DEVICE, name, tid) for tid, name in threads.items()),
        label("process_name", HOST, "/host:CPU"),
        label("thread_name", HOST, "python3", PYTHON),
        *(event for number in range(steps) for event in step(number, start + 2000.0 * number)),
        {},
    ]
    return {"displayTimeUnit": "ns", "metadata": {"highres-ticks": True}, "traceEvents": events}


def text(found: Any = None) -> bytes:
    return json.dumps(trace() if found is None else found, separators=(",", ":")).encode()
