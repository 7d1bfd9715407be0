"""The docs' page on debugging a kernel, from what ran: python examples/debugging/page.py docs/debugging.md"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD = HERE / "recorded.json"
Sessions = Mapping[str, Mapping[str, Any]]
INTRO = """# Debugging a kernel

One wrong Triton kernel, four wrong kernels in CUDA C++ and the ladder's matmul, under each tool. Everything below ran:
`examples/debugging/sessions.py` runs the sessions and keeps what they print (addresses and folders shortened), and this
page is made of that by `make docs`. What needs a GPU is recorded by `sessions.py --gpu` on one, within 90 seconds.

| what is wrong | look with |
| --- | --- |
| the numbers | the interpreter and pdb, `device_print` |
| an address, a race, a missing mask in Triton | `sublight xray --run`, without a GPU |
| an address in CUDA C++ | compute-sanitizer, memcheck |
| threads that meet in shared memory | compute-sanitizer, racecheck |
| values that were never written | compute-sanitizer, initcheck |
| a barrier that some threads do not come to | compute-sanitizer, synccheck |
| you do not know | cuda-gdb: stop in the kernel, look at threads, warps, shared memory |
"""
PARTS = (  # heading, words, files shown, sessions
    (
        "A wrong kernel",
        "The mean of each row, by [row_mean.py](../examples/debugging/row_mean.py): a row has 6 numbers, a block 8, "
        "and the load has no mask. Nothing complains; the means are wrong, and the last row's differ from run to run, "
        "since what lies behind the tensor does.",
        ("row_mean.py",),
        ("wrong",),
    ),
    (
        "The interpreter, and pdb",
        "With `TRITON_INTERPRET=1` a kernel is Python: a breakpoint stops in a program, and a block is a NumPy array. "
        "Program 0 has loaded 7 and 8, which are the next row's. What the interpreter does not show: programs run one "
        "after the other, so that a race gives the right answer, and an address outside a tensor is read silently.",
        (),
        ("interpreter",),
    ),
    (
        "device_print",
        "`tl.device_print` in the kernel, on the CPU's interpreter and on a GPU. On a GPU every thread prints what it "
        "holds, through a buffer that the host empties at the next synchronization: 128 threads hold a block of 8 "
        "elements 16 times over, and programs print in any order.",
        (),
        ("device_print-cpu", "device_print-gpu"),
    ),
    (
        "sublight xray --run",
        "Every address is held against the tensor that its pointer came from, without a GPU "
        "([more](xray.md#races-and-bounds)). Of this mistake it sees the part that leaves the tensor; that program 0 "
        "reads the next row's numbers is an address like any other.",
        (),
        ("xray",),
    ),
    (
        "compute-sanitizer: memcheck, racecheck, initcheck, synccheck",
        "It runs the machine code itself under watch, some ten to a hundred times slower. `-lineinfo` gives it the "
        "lines. Each tool sees one kind of mistake and is silent about the others: here is one for each, launched by "
        "[launch.py](../examples/debugging/launch.py) without PyTorch, whose allocator hands out parts of one large "
        "piece of memory and so hides accesses outside of a tensor (`PYTORCH_NO_CUDA_MEMORY_CACHING=1` undoes that).",
        ("planted.cu",),
        ("memcheck", "racecheck", "initcheck", "synccheck"),
    ),
    (
        "cuda-gdb",
        "The ladder's `matmul_tiled` compiled with `-g -G` (no optimization, all variables there), stopped at its "
        "first line and then behind the barrier of its first tile: which warps are where. Then block (1, 0, 0), thread "
        "(3, 2, 0) is looked at: its row, its column, a row of the tile in shared memory, and the lanes of its warp. "
        "The commands come from a file, so that the session can be repeated; of a long output the first lines are "
        "shown, and how many are left out.",
        (),
        ("cuda-gdb",),
    ),
)


def page(sessions: Sessions) -> str:
    return "\n".join([INTRO, *(line for part in PARTS for line in _part(sessions, *part))])


def _part(
    sessions: Sessions, heading: str, words: str, files: tuple[str, ...], names: tuple[str, ...]
) -> Iterator[str]:
    yield f"## {heading}\n\n{words}\n"
    for file in files:
        language = "cpp" if file.endswith(".cu") else "text"
        yield f"[{file}](../examples/debugging/{file}):\n\n```{language}\n{kernel_text(file)}\n```\n"
    for name in names:
        yield _session(name, sessions.get(name))


def _session(name: str, session: Mapping[str, Any] | None) -> str:
    if session is None:
        return f"*{name} is not recorded yet: `python examples/debugging/sessions.py --gpu` on a GPU does it.*\n"
    where = "" if session["machine"] == "cpu" else f" (on an {session['machine']})"
    if session["status"] is None:
        return f"*{name} did not run{where}: {session['output']}.*\n"
    lines = session["command"].splitlines()
    shown = "\n".join(line if line.startswith("(cuda-gdb)") else f"$ {line}" for line in lines)
    return f"Exit status {session['status']}{where}:\n\n```text\n{shown}\n{session['output']}\n```\n"


def kernel_text(file: str) -> str:
    """A file whole, or of a Python file the kernel alone."""
    text = (HERE / file).read_text(encoding="utf-8").strip()
    return text if not file.endswith(".py") else "@triton.jit" + text.split("@triton.jit")[1].split("\n\n\n")[0]


def read() -> Sessions:
    kept = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []
    return {each["name"]: each for each in kept}


def main() -> int:
    if len(sys.argv) != 2:
        print("use: python examples/debugging/page.py FILE.md", file=sys.stderr)
        return 2
    Path(sys.argv[1]).write_text(page(read()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
