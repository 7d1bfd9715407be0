"""The docs' page of the CUDA C++ ladders: python -m sublight.report.ladders FOLDER [RUN.json]

What each step changed stands in its record; its time and share of the limit come from a run of
`benchmarks/cuda_ladders.py`, and where there is none the page says so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from sublight import units
from sublight.errors import BadInput
from sublight.extensions import LADDERS, ledger
from sublight.report import bench
from sublight.report.draw.bars import Bar, bars
from sublight.report.markdown import escape, table
from sublight.results import Result, Run, read_run, write_file

PICTURE = "images/cuda-ladders.svg"
TARGET = 90  # whose registers the page shows
INTRO = """# CUDA C++, step by step

Triton hides threads; these kernels show them. Each ladder is one function in CUDA C++
([sublight/extensions/kernels](../sublight/extensions/kernels)), a kernel a step, from the plainest towards the
machine's limit. Each step has one idea, and is right by the project's one rule: no further from a float64
reference than twice what PyTorch's own function is.

## How they are built and launched

- The kernels hold nothing of PyTorch: `nvcc -cubin` compiles a file in ten seconds, on a machine without a GPU, too,
  into the user's cache. `sublight/extensions/driver.py` loads the cubin through the driver's C interface (ctypes on
  libcuda) and launches on PyTorch's stream: no extension to build, no CUDA version that must match PyTorch's.
- Where there is no GPU, a C++ compiler takes the same file: `kernels/played.h` plays CUDA's words on a CPU, a fiber
  for each thread, barriers, shuffles, asynchronous copies and tensor cores included. So indices, barriers and
  arithmetic are tested everywhere; how fast a kernel is, only a GPU says. Threads also run from the last to the
  first, which shows many a missing barrier; it is no proof that none is missing.
- `compiled.json` holds registers, spills and shared memory of each kernel for sm_80, sm_90 and sm_100; a test
  compiles what changed. `python -m sublight.extensions.ledger` writes it anew.
- `sublight xray FILE.cu` shows a kernel's instructions, occupancy and accesses ([xray.md](xray.md)): of `transpose.cu`,
  with `--threads 32x8 --grid 256x256 --arg 2=8192 --arg 3=8192`, the 32-way conflict of `conflicts` at its line, and
  none in `padded` and `swizzled`.
- The transformer's ops come last, forward and backward, as llm.c has them; `transformer/step.py` makes a whole GPT-2
  step of them, AdamW included, with PyTorch as the owner of memory only: losses, gradients and parameters after AdamW
  are held against PyTorch's step by the same rule (with eps = rate: with 1e-8 a gradient next to zero is divided by
  itself, and its rounding decides the step), and AdamW with eps 1e-8 over three steps.
- `sublight bench cuda:matmul` checks and times every step of a ladder on this GPU, beside PyTorch and beside our op
  where it takes the same inputs (softmax, layer_norm, matmul, gelu, transpose); `sublight bench softmax cuda:softmax`
  shows both in one run; `--shape`, `--dtype`, `--quick`, `--json` are as for ops; `benchmarks/cuda_ladders.py` has all.
- compute-sanitizer's memcheck, racecheck and synccheck find nothing in any step (`compute-sanitizer --tool racecheck
  python benchmarks/cuda_ladders.py --check`; H200, 2026-11-16, d7c81cd): small shapes that cross block boundaries.
- A new step is a kernel in its `.cu`, a `Rung` in the ladder's Python file, then `python -m sublight.extensions.ledger`
  and `make docs`: tests, the benchmark and this page read the record.

```python
import torch
from sublight.errors import BadInput
from sublight.extensions import LADDERS

transpose = next(ladder for ladder in LADDERS if ladder.name == "transpose")
x = torch.randn(64, 96)  # on a GPU: device="cuda"
try:
    assert transpose.call(transpose.rung("swizzled"))(x).equal(x.t())
except BadInput as error:
    print(error)  # no C++ compiler here, or no nvcc: one line with the fix
```
"""


def page(run: Run | None) -> str:
    parts = [INTRO.strip(), _measured(run)]
    _, kept = ledger.read()
    for ladder in LADDERS:
        parts += [f"## {escape(ladder.name)}", f"Computes {ladder.summary}: "
                  f"[{ladder.source}](../sublight/extensions/kernels/{ladder.source})."]  # fmt: skip
        rows = []
        for rung in ladder.rungs:
            figures = kept.get(ledger.key_of(rung.source or ladder.source, TARGET), {})
            registers = [figures[name].registers for name in rung.kernels if name in figures]
            rows.append((rung.name, _range(registers), rung.change))
        parts.append(table(("step", f"registers (sm_{TARGET})", "what changed, and why"), rows))
        if run and (timed := [row for row in run.rows if row.op == ladder.name]):
            parts.append(_times(timed))
        else:
            parts.append("Not yet measured.")
    return "\n\n".join(parts) + "\n"


def _range(figures: Sequence[int]) -> str:
    """
    >>> _range([]), _range([32, 32]), _range([22, 59])
    ('–', '32', '22 to 59')
    """
    if not figures:
        return "–"
    return str(figures[0]) if min(figures) == max(figures) else f"{min(figures)} to {max(figures)}"


def _measured(run: Run | None) -> str:
    if run is None or not run.rows:
        return (
            "**Not yet measured.** On a machine with a GPU and nvcc, `python benchmarks/cuda_ladders.py --json "
            "benchmarks/cuda_ladders_h200.json` checks and times every step; `make docs` then fills in this page."
        )
    return (
        f"Measured on {escape(bench.heading(run))}, {run.date[:10]}, by `benchmarks/cuda_ladders.py`. *Of limit*: the "
        "floor, from what this machine reached in `sublight limits`, over the time. Generated by `make docs`."
        f"\n\n![share of the limit by step]({PICTURE})"
    )


def _times(rows: Sequence[Result]) -> str:
    cells = []
    for case in bench.cases(rows):
        theirs = next((row.median_s for row in case if row.provider == "torch"), None)
        for index, row in enumerate(case):
            against = f"{theirs / row.median_s:.2f}" if row.median_s and theirs and row.ours else ""
            name = bench.case_text(row).replace(f"{row.op} {row.direction} ", "") if index == 0 else ""
            name_and_step = (name, "PyTorch" if row.provider == "torch" else row.provider)
            figures = (units.text(row.median_s, "s"), units.percent(row.fraction), against)
            cells.append((*name_and_step, *figures, bench.note(row)))
    names = ("shape", "step", "time", "of limit", "PyTorch's time / its", "note")
    return table(names, cells, right=names[2:5])


def picture(run: Run) -> str:
    groups = []
    for case in bench.cases(run.rows):
        shown = [
            Bar(name="PyTorch" if row.provider == "torch" else row.provider, share=row.fraction, ours=row.ours)
            for row in case
            if row.fraction is not None and not bench.wrong(row)
        ]
        if shown:
            groups.append((bench.case_text(case[0]).replace(" fwd ", " "), shown))
    return bars(f"Share of the limit, step by step: {bench.heading(run)}", groups)


def write(folder: Path, run: Run | None) -> list[Path]:
    """The page, and the picture where there are figures; gives their names."""
    written = [folder / "cuda.md"]
    write_file(page(run), written[0])
    if run and run.rows:
        written.append(folder / PICTURE)
        write_file(picture(run), written[1])
    return written


def main(words: Sequence[str]) -> int:
    if len(words) not in (1, 2):
        print("sublight: write: python -m sublight.report.ladders FOLDER [RUN.json]", file=sys.stderr)
        return 2
    path = Path(words[1]) if len(words) == 2 else None
    try:
        written = write(Path(words[0]), read_run(path) if path and path.exists() else None)
    except BadInput as error:
        print(f"sublight: {error}", file=sys.stderr)
        return 2
    print("\n".join(f"wrote {each}" for each in written))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
