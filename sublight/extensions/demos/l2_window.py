"""A window of addresses that the L2 keeps while other bytes stream through it."""

from __future__ import annotations

import ctypes

from sublight.extensions.demos.demo import Demo, Figures, Table
from sublight.extensions.demos.gpu import L2_BYTES, PERSISTING_L2_BYTES, WINDOW_BYTES, Gpu
from sublight.extensions.driver import call

HOT_BYTES = tuple(2**20 * size for size in (4, 8, 16, 32, 64))
STREAM_BYTES = 2**29
HOPS = 64
LINE_BYTES = 128
_WINDOW_OF_A_STREAM = 1  # CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
_PERSISTING_LIMIT = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE
_NORMAL, _STREAMING, _PERSISTING = 0, 1, 2  # CU_ACCESS_PROPERTY_…


class Window(ctypes.Structure):
    """CUaccessPolicyWindow; the driver's union of launch attributes is 64 bytes."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_size_t),
        ("hit_ratio", ctypes.c_float),
        ("hit", ctypes.c_int),
        ("miss", ctypes.c_int),
        ("rest", ctypes.c_char * 32),
    )


def set_window(address: int, size: int, hit_ratio: float) -> None:
    """Set the default stream's window; a size of 0 ends it."""
    hit = _PERSISTING if size else _NORMAL
    miss = _STREAMING if size else _NORMAL
    window = Window(base=address, bytes=size, hit_ratio=hit_ratio, hit=hit, miss=miss)
    call("cuStreamSetAttribute", ctypes.c_void_p(0), _WINDOW_OF_A_STREAM, ctypes.byref(window))


def run(gpu: Gpu) -> Figures:
    kept_bytes = gpu.attribute(PERSISTING_L2_BYTES)
    call("cuCtxSetLimit", _PERSISTING_LIMIT, ctypes.c_size_t(kept_bytes))
    stream, out = gpu.buffer(STREAM_BYTES), gpu.buffer(64)
    rows = []
    for hot_bytes in HOT_BYTES:
        hot, lines = gpu.buffer(hot_bytes), hot_bytes // LINE_BYTES
        gpu.launch("link_lines", 1024, 256, hot, lines)

        def spoil(hot: object = hot, hot_bytes: int = hot_bytes) -> None:
            gpu.launch("pass_through", 1024, 256, hot, out, hot_bytes // 16)
            gpu.launch("pass_through", 1024, 256, stream, out, STREAM_BYTES // 16)

        def use(hot: object = hot, lines: int = lines) -> None:
            gpu.launch("follow", 1, 32, hot, out, lines, HOPS)

        set_window(0, 0, 0.0)
        without = gpu.time(use, before=spoil) / HOPS
        set_window(hot.address, min(hot_bytes, gpu.attribute(WINDOW_BYTES)), min(1.0, kept_bytes / hot_bytes))
        within = gpu.time(use, before=spoil) / HOPS
        set_window(0, 0, 0.0)
        call("cuCtxResetPersistingL2Cache")
        rows.append((hot_bytes, without, within, without / within))
    note = (
        f"The L2 holds {gpu.attribute(L2_BYTES) / 1e6:.0f} MB, of which {kept_bytes / 1e6:.0f} MB may be kept for "
        f"windows; {STREAM_BYTES / 1e6:.0f} MB pass through it before each measurement."
    )
    table = Table(
        title="One access to the hot bytes after others have streamed past",
        columns=(("hot bytes", "B"), ("no window", "s"), ("window", "s"), ("faster", "times")),
        rows=tuple(rows),
        note=note,
    )
    return Figures(tables=(table,))


L2_WINDOW = Demo(
    name="l2-window",
    question="Can a program keep some bytes in the L2 while others stream through it?",
    expect="Half a gigabyte of other bytes pushes the hot ones out: the next access waits for device memory. With an "
    "access policy window over the hot bytes their lines are kept, and an access takes the L2's time, as long as they "
    "fit into the part of the L2 that may be set aside; beyond it the gain fades.",
    run=run,
    source="../demos/l2_window.cu",
    kernels=("link_lines", "follow", "pass_through"),
)
