"""Start-up with machine code, with PTX that the driver compiles, and with PTX that it has compiled before.

python -m sublight.extensions.demos.jit FILE KERNEL    load one file in a new process: JSON
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sublight.extensions import build
from sublight.extensions.demos.demo import Demo, Figures, Table
from sublight.extensions.demos.gpu import Gpu

SOURCE, KERNEL = "matmul.cu", "matmul_naive"  # the ladder's largest file
CHILD_LIMIT_S = 40


def load_s(path: str, kernel: str) -> float:
    """Seconds from an image in memory to a kernel that can be launched."""
    gpu, image = Gpu(), Path(path).read_bytes()
    start = time.perf_counter()
    gpu.load(image)
    gpu.function(kernel)
    return time.perf_counter() - start


def _in_a_process(path: Path, variables: Mapping[str, str]) -> float:
    command = [sys.executable, "-m", "sublight.extensions.demos.jit", str(path), KERNEL]
    environment = {**os.environ, "CUDA_MODULE_LOADING": "EAGER", **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=CHILD_LIMIT_S, env=environment)
    if done.returncode:
        raise RuntimeError(f"loading {path.name}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}")
    return float(json.loads(done.stdout)["load_s"])


def run(gpu: Gpu) -> Figures:
    code, words = build.cubin(SOURCE, gpu.capability), build.ptx(SOURCE, gpu.capability)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ptx = folder / "kernels.ptx"
        ptx.write_bytes(words.encode() + b"\0")  # the driver reads to the first zero
        cache = {"CUDA_CACHE_PATH": str(folder / "cache"), "CUDA_CACHE_DISABLE": "0"}
        rows = [
            ("machine code (SASS)", code.stat().st_size, _in_a_process(code, {})),
            ("PTX, the driver's cache off", len(words), _in_a_process(ptx, {"CUDA_CACHE_DISABLE": "1"})),
            ("PTX, first process", len(words), _in_a_process(ptx, cache)),
            ("PTX, second process", len(words), _in_a_process(ptx, cache)),
        ]
    return Figures(
        tables=(
            Table(
                title=f"Loading {SOURCE} (8 kernels and their helpers) in a new process",
                columns=(("image", ""), ("size", "B"), ("until a kernel can be launched", "s")),
                rows=tuple(rows),
                note="The context is there already; all kernels are loaded at once (CUDA_MODULE_LOADING=EAGER).",
            ),
        )
    )


def main(words: Sequence[str]) -> None:
    print(json.dumps({"load_s": load_s(words[0], words[1])}))


JIT = Demo(
    name="jit",
    question="What does a program pay at start-up when it ships PTX instead of machine code?",
    expect="Machine code for this GPU loads in less than a millisecond. PTX is compiled by the driver when it is "
    "loaded: seconds for large kernels, at every start, unless the driver's cache (~/.nv/ComputeCache) has the result "
    "of an earlier process. Ship machine code for the GPUs you know, and PTX for those to come.",
    run=run,
)

if __name__ == "__main__":
    main(sys.argv[1:])
