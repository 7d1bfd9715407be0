"""Traces made by hand: a training loop with something of everything, and a step too large for any page."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sublight.trace.record import EMPTY, NONE, Detail, Device, Kind, Lane, MemoryLog, Trace

HOSTILE = "</script><img src=x onerror=alert(1)>"  # a kernel may be called that
MAIN, BACKWARD, LOADER, COMPUTE, COPIES = range(5)
LANES = (
    Lane(kind="thread", process="python 4117", number="4117", label="MainThread"),
    Lane(kind="thread", process="python 4117", number="4188", label="pt_autograd_0"),
    Lane(kind="thread", process="python 4117", number="4201", label=""),
    Lane(kind="stream", process="GPU 0", number="7", device=0),
    Lane(kind="stream", process="GPU 0", number="14", device=0),
)
STEP_NS = 20_000_000
LAYERS = 6
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64_warpgroupsize2x1x1_execute_segment_k_off_kernel"


@dataclass(slots=True)
class Tape:
    """Events in any order; sorted into a Trace at the end."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    details: list[Detail] = field(default_factory=lambda: [EMPTY])
    correlations: int = 0

    def add(self, kind: Kind, name: str, lane: int, start: int, end: int, detail: Detail = EMPTY, **more: int) -> None:
        if detail not in self.details:
            self.details.append(detail)
        ids = (more.get(key, NONE) for key in ("correlation", "external", "sequence", "bytes"))
        at = self.names.setdefault(name, len(self.names))
        self.rows.append((kind, at, lane, self.details.index(detail), start, end, *ids))

    def launch(self, op: str, kernel: str, lane: int, at: int, runs: tuple[int, int], detail: Detail = EMPTY) -> None:
        """An op of 12 µs on a host thread, the call inside it that launches, and the kernel."""
        self.correlations += 1
        grid = Detail(grid=(132, 1, 1), block=(384, 1, 1), registers=168, shared_bytes=200_000)
        self.add(Kind.OP, op, lane, at, at + 12_000, detail, external=self.correlations)
        self.add(Kind.RUNTIME, "cudaLaunchKernel", lane, at + 4_000, at + 9_000, EMPTY, correlation=self.correlations)
        self.add(Kind.KERNEL, kernel, COMPUTE, *runs, grid, correlation=self.correlations)

    def trace(self, memory: MemoryLog | None, lanes: tuple[Lane, ...] = LANES) -> Trace:
        self.rows.sort(key=lambda row: (row[4], -row[5]))
        columns = np.array(self.rows, dtype=np.int64).reshape(-1, 10).T
        kind, name, lane, detail, start, end, correlation, external, sequence, size = columns
        return Trace(
            source="train.py",
            tool="pytorch",
            names=tuple(self.names),
            lanes=lanes,
            details=tuple(self.details),
            devices=(Device(index=0, name="NVIDIA H200", sms=132),),
            memory=memory,
            kind=kind.astype(np.uint8),
            name=name.astype(np.int32),
            lane=lane.astype(np.int32),
            detail=detail.astype(np.int32),
            start_ns=start,
            end_ns=end,
            correlation=correlation,
            external=external,
            sequence=sequence,
            bytes=size,
            graph_node=np.full(len(kind), NONE, dtype=np.int64),
        )


def trace(*, steps: int = 3) -> Trace:
    """Training of a small transformer that waits on its data loader, and reads its loss back every step."""
    tape = Tape()
    for step in range(steps):
        _step(tape, step, step * STEP_NS)
    return tape.trace(_memory(steps))


def _step(tape: Tape, step: int, t: int) -> None:
    x = Detail(dims=((8192, 1024), (1024, 4096), (4096,)), types=("c10::BFloat16", "c10::BFloat16", "c10::BFloat16"))
    row = Detail(dims=((8192, 1024),), types=("c10::BFloat16",))
    tape.add(Kind.RANGE, f"ProfilerStep#{step}", MAIN, t, t + STEP_NS - 50_000)
    tape.add(Kind.RANGE, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", MAIN, t + 20_000, t + 6_200_000)
    for piece in range(30):
        at = t + 100_000 + piece * 200_000
        tape.add(Kind.OP, "aten::index_select", MAIN, at, at + 180_000)
    tape.correlations += 1
    tape.add(Kind.OP, "aten::copy_", MAIN, t + 6_260_000, t + 6_900_000, row)
    call = {"correlation": tape.correlations}
    tape.add(Kind.RUNTIME, "cudaMemcpyAsync", MAIN, t + 6_280_000, t + 6_880_000, EMPTY, **call)
    tape.add(
        Kind.MEMCPY,
        "Memcpy HtoD (Pageable -> Device)",
        COPIES,
        t + 6_300_000,
        t + 6_870_000,
        EMPTY,
        **call,
        bytes=12_582_912,
    )
    host, device = t + 7_000_000, t + 7_030_000
    tape.add(Kind.RANGE, "forward", MAIN, host - 5_000, host + LAYERS * 85_000)
    for layer in range(LAYERS):
        tape.add(Kind.PYTHON, f"nn.Module: Block_{layer}", MAIN, host, host + 85_000)
        for op, kernel, length, detail in (
            ("aten::layer_norm", "void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>", 38_000, row),
            ("aten::linear", GEMM, 190_000, x),
            ("aten::gelu", "void at::native::vectorized_elementwise_kernel<8, GeluCUDAKernelImpl>", 62_000, row),
            ("aten::linear", GEMM, 196_000, x),
            ("aten::add", "void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add>", 30_000, row),
        ):
            tape.launch(op, kernel, MAIN, host, (device, device + length), detail)
            host, device = host + 17_000, device + length + 1_500
    tape.add(Kind.OP, "aten::item", MAIN, host, device + 60_000)
    tape.add(Kind.RUNTIME, "cudaStreamSynchronize", MAIN, host + 10_000, device + 50_000)
    host = device = device + 90_000
    for layer in reversed(range(LAYERS)):
        for name, kernel, length in (
            ("AddmmBackward0", GEMM, 380_000),
            ("GeluBackward0", "void at::native::vectorized_elementwise_kernel<8, GeluBackwardCUDAKernelImpl>", 70_000),
            ("NativeLayerNormBackward0", f"layer_norm_grad_input_kernel{HOSTILE if layer == 2 else ''}", 88_000),
        ):
            begin = max(device, host + 12_000)
            tape.launch(
                f"autograd::engine::evaluate_function: {name}", kernel, BACKWARD, host, (begin, begin + length), x
            )
            host, device = host + 20_000, begin + length + 1_500
    host, device = device + 40_000, device + 60_000
    for _ in range(60):
        tape.launch("aten::_foreach_add_", "multi_tensor_apply_kernel", MAIN, host, (device, device + 3_000))
        host, device = host + 22_000, device + 22_000


def _memory(steps: int) -> MemoryLog:
    times, totals = [], []
    for step in range(steps):
        for part in range(60):
            times.append(step * STEP_NS + 7_000_000 + part * 150_000)
            totals.append(int(4e9 + 6.5e9 * (1 - abs(part - 30) / 30)))
    allocated = np.array(totals, dtype=np.int64)
    return MemoryLog(
        time_ns=np.array(times, dtype=np.int64),
        delta_bytes=np.diff(allocated, prepend=0),
        allocated_bytes=allocated,
        reserved_bytes=np.full(len(times), 12_000_000_000, dtype=np.int64),
        device=np.zeros(len(times), dtype=np.int64),
    )


def crowd(events: int = 300_000, *, distinct_names: bool = False) -> Trace:
    """One step with so many events that no page could hold them all."""
    starts = np.arange(events, dtype=np.int64) // 2 * 700
    ends = starts + np.where(np.arange(events) % 997 == 0, 690, 300)
    device = np.arange(events) % 2 == 1
    names = tuple(f"kernel_{n}_{HOSTILE}" * 4 for n in range(events if distinct_names else 500))
    none = np.full(events, NONE, dtype=np.int64)
    return Trace(
        source="big.json.gz",
        tool="pytorch",
        names=names,
        lanes=LANES,
        details=(EMPTY, Detail(grid=(64, 1, 1), block=(256, 1, 1))),
        kind=np.where(device, Kind.KERNEL, Kind.RUNTIME).astype(np.uint8),
        name=(np.arange(events) % len(names)).astype(np.int32),
        lane=np.where(device, COMPUTE, MAIN).astype(np.int32),
        detail=device.astype(np.int32),
        start_ns=starts,
        end_ns=ends,
        correlation=np.arange(events, dtype=np.int64) // 2,
        external=none,
        sequence=none,
        bytes=none,
        graph_node=none,
    )
