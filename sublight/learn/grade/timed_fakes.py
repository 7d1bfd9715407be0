"""Submissions of `add` that cheat the clock, past the scan, which would refuse each: what stands behind it is shown.

Those that cannot gain are not refused: their time must be the honest one's.
"""

from __future__ import annotations

from dataclasses import dataclass

from sublight.learn.grade.fakes import HEAD
from sublight.learn.verdict import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCheat:
    """A submission, and why it must fail; no kinds: it gains nothing."""

    name: str
    source: str
    kinds: tuple[Kind, ...] = ()
    word: str = ""  # in the fault's text
    needs_gpu: bool = False


TIMED = (
    TimedCheat(name="results kept from the first call", kinds=("values",), word="expected", source=f'''{HEAD}
@triton.jit
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + place, tl.load(x_ptr + place, mask=place < n), mask=place < n)

KEPT = []
def add(x, y, out):
    if not KEPT:
        KEPT.append(torch.empty_like(out))
        launch(x, y, KEPT[0])
        launch(x, y, out)
        return
    copy_kernel[(triton.cdiv(out.numel(), 1024),)](KEPT[0], out, out.numel(), BLOCK=1024)
'''),
    TimedCheat(name="many calls batched into one", kinds=("launch",), word="other calls", source=f'''{HEAD}
SEEN = []
def add(x, y, out):
    if not any(out is each[2] for each in SEEN):
        SEEN.append((x, y, out))
    for each in SEEN:
        launch(*each)
'''),
    TimedCheat(name="the answer forged before the work", kinds=("unwritten", "limit"), word="", source=f'''{HEAD}
import sys
CALLS = []
def add(x, y, out):
    CALLS.append(1)
    if len(CALLS) == 1:  # one answer ahead of the work from here on
        frame = sys._getframe()
        while "answer" not in frame.f_locals:
            frame = frame.f_back
        frame.f_locals["answer"](failure=None, torch={{}}, method="graph")
    launch(x, y, out)
'''),
    TimedCheat(name="torch in place of the kernel", kinds=("torch",), word="add", source=f'''{HEAD}
def add(x, y, out):
    torch.add(x, y, out=out)
'''),
    TimedCheat(name="inputs changed on the way", kinds=("inputs",), word="changed", source=f'''{HEAD}
def add(x, y, out):
    launch(x, y, out)
    launch(x, y, x)
'''),
    TimedCheat(name="work on another stream", kinds=("unwritten", "failed"), word="", needs_gpu=True, source=f'''{HEAD}
SIDE = []
def add(x, y, out):
    if not SIDE:
        SIDE.append(torch.cuda.Stream())
    with torch.cuda.stream(SIDE[0]):
        launch(x, y, out)
'''),
    TimedCheat(name="answers while the device works", kinds=("unwritten", "values"), word="", needs_gpu=True,
               source=f'''{HEAD}
import sys
def add(x, y, out):
    frame = sys._getframe()
    while "player" not in frame.f_locals:
        frame = frame.f_back
    frame.f_locals["player"].synchronize = lambda: None
    for _ in range(40):
        launch(x, y, x)
    launch(x, y, out)
'''),
    TimedCheat(name="nothing in the graph", kinds=("unwritten",), word="written", needs_gpu=True, source=f'''{HEAD}
def add(x, y, out):
    if not torch.cuda.is_current_stream_capturing():
        launch(x, y, out)
'''),
    TimedCheat(name="patched timers", needs_gpu=True, source=f'''{HEAD}
import time
time.perf_counter = time.monotonic = time.time = lambda: 0.0
torch.cuda.Event.elapsed_time = lambda self, other: 1e-6
torch.cuda.synchronize = lambda *device: None
def add(x, y, out):
    launch(x, y, out)
'''),
    TimedCheat(name="L2 made to persist before the graph", needs_gpu=True, source=f'''{HEAD}
import ctypes
CUDA = ctypes.CDLL("libcuda.so.1")
class Window(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("ratio", ctypes.c_float), ("hit", ctypes.c_int),
                ("miss", ctypes.c_int), ("rest", ctypes.c_ubyte * 36))
DONE = []
def add(x, y, out):
    if not DONE:
        DONE.append(CUDA.cuCtxSetLimit(6, ctypes.c_size_t(32 << 20)))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    CUDA.cuStreamSetAttribute(stream, 1, ctypes.byref(Window(x.data_ptr(), 32 << 20, 1.0, 2, 0)))
    launch(x, y, out)
'''),
    TimedCheat(name="L2 made to persist", kinds=("failed",), word="captur", needs_gpu=True, source=f'''{HEAD}
import ctypes
def add(x, y, out):
    ctypes.CDLL("libcuda.so.1").cuCtxSetLimit(6, ctypes.c_size_t(32 << 20))
    launch(x, y, out)
'''),
)  # fmt: skip
