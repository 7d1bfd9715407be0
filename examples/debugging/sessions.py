"""Run every debugging session of docs/debugging.md and keep what it printed.

    python examples/debugging/sessions.py                    what needs no GPU; the rest stays as it was recorded
    python examples/debugging/sessions.py --gpu --json F     what needs one, within 90 s (and CUDA's tools)
    python examples/debugging/sessions.py --merge F          put these into the record

`make docs` writes the page from the record: nothing on it is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from sublight.errors import BadInput

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RECORD = HERE / "recorded.json"
MATMUL = ROOT / "sublight" / "extensions" / "kernels" / "matmul.cu"
LIMIT_S, EACH_LIMIT_S = 90.0, 25.0
LINES = 60  # lines of an output that are kept
PLANTED = {  # tool of compute-sanitizer -> kernel of planted.cu
    "memcheck": "out_of_bounds",
    "racecheck": "missing_barrier",
    "initcheck": "never_written",
    "synccheck": "divided_barrier",
}
SCRIPT = "examples/debugging/row_mean.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    name: str
    machine: str  # cpu, or the GPU's name
    command: str  # as a user types it
    output: str
    status: int | None  # None: the command did not run, and `output` says why


def tidy(output: str) -> str:
    """Without what differs from run to run and says nothing: addresses, process ids, folders, empty lines.

    >>> tidy("== at 0x7f21 in /home/me/x/launch.py\\n\\nWarning: [pid 71] end  ")
    '== at 0x… in launch.py\\nWarning: [pid …] end'
    """
    output = re.sub(r"0x[0-9a-f]{4,}", "0x…", output.replace(f"{ROOT}/", ""))
    output = re.sub(r"(?<![\w./-])/\S*/(\w[\w.-]*)", r"\1", output)
    output = re.sub(r"\b(pid|process|Process|LWP) \d+", r"\1 …", output)
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    kept = lines if len(lines) <= LINES else [*lines[: LINES - 1], f"… ({len(lines) - LINES + 1} more lines)"]
    return "\n".join(kept)


def ran(name: str, machine: str, shown: str, command: Sequence[str], limit_s: float, **variables: str) -> Session:
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s, stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "PYTHONWARNINGS": "ignore", **variables},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Session(name=name, machine=machine, command=shown, output=f"took more than {limit_s:.0f} s", status=None)
    except OSError as error:
        return Session(name=name, machine=machine, command=shown, output=str(error.strerror), status=None)
    return Session(
        name=name, machine=machine, command=shown, output=tidy(done.stdout + done.stderr), status=done.returncode
    )


def on_the_cpu() -> Iterator[Session]:
    python = sys.executable
    line = next(i for i, text in enumerate((ROOT / SCRIPT).read_text().splitlines(), 1) if "total = tl.sum" in text)
    yield ran("wrong", "cpu", f"TRITON_INTERPRET=1 python {SCRIPT}", [python, SCRIPT], 60, TRITON_INTERPRET="1")
    stops = [f"break {SCRIPT}:{line}", "continue", "p row", "p x", "p places", "clear 1", "continue", "quit"]
    commands = [word for stop in stops for word in ("-c", stop)]
    shown = " ".join(f"-c '{stop}'" for stop in stops)
    yield ran(
        "interpreter", "cpu", f"TRITON_INTERPRET=1 python -m pdb {shown} {SCRIPT}",
        [python, "-m", "pdb", *commands, SCRIPT], 60, TRITON_INTERPRET="1",
    )  # fmt: skip
    yield ran(
        "device_print-cpu", "cpu", f"TRITON_INTERPRET=1 python {SCRIPT} --print", [python, SCRIPT, "--print"], 60,
        TRITON_INTERPRET="1",
    )  # fmt: skip
    yield ran("xray", "cpu", f"sublight xray --run {SCRIPT}", [python, "-m", "sublight", "xray", "--run", SCRIPT], 60)


def on_the_gpu() -> Iterator[Session]:
    """Each tool on a mistake of its own, then the debugger in the ladder's matmul."""
    from sublight.extensions import build
    from sublight.extensions.demos.gpu import Gpu

    end = time.monotonic() + LIMIT_S
    gpu = Gpu()
    machine, arch = gpu.name, f"-arch=sm_{gpu.capability}"

    def left_s() -> float:
        return max(1.0, min(EACH_LIMIT_S, end - time.monotonic()))

    with tempfile.TemporaryDirectory() as folder:
        planted, matmul = Path(folder) / "planted.cubin", Path(folder) / "matmul.cubin"
        building = subprocess.Popen([build.nvcc(), "-std=c++17", "-cubin", "-g", "-G", arch, "-o", matmul, MATMUL])
        source = "examples/debugging/planted.cu"
        subprocess.run(
            [build.nvcc(), "-cubin", "-lineinfo", arch, "-o", planted, source], cwd=ROOT, check=True, timeout=60
        )
        compile_shown = f"nvcc -cubin -lineinfo {arch} -o planted.cubin {source}"
        for tool, kernel in PLANTED.items():
            command = [
                "--tool",
                tool,
                "--print-limit",
                "2",
                "python",
                "examples/debugging/launch.py",
                "planted.cubin",
                kernel,
            ]
            words = [sys.executable if word == "python" else word for word in command]
            words = [str(planted) if word == "planted.cubin" else word for word in words]
            shown = f"{compile_shown}\ncompute-sanitizer {' '.join(command)}"
            yield ran(tool, machine, shown, [_tool("compute-sanitizer"), *words], left_s())
        yield ran(
            "device_print-gpu", machine, f"python {SCRIPT} --device cuda --print",
            [sys.executable, SCRIPT, "--device", "cuda", "--print"], left_s(),
        )  # fmt: skip
        try:
            building.wait(left_s())
        except subprocess.TimeoutExpired:
            building.kill()
        commands = Path(folder) / "commands"
        commands.write_text("\n".join(debugger_commands()) + "\n", encoding="utf-8")
        launch = [sys.executable, "examples/debugging/launch.py", str(matmul), "matmul_tiled"]
        shown = "\n".join(
            (
                f"nvcc -std=c++17 -cubin -g -G {arch} -o matmul.cubin sublight/extensions/kernels/matmul.cu",
                "cuda-gdb --batch -x commands --args python examples/debugging/launch.py matmul.cubin matmul_tiled",
                *(f"(cuda-gdb) {line}" for line in debugger_commands()),
            )
        )
        yield ran(
            "cuda-gdb", machine, shown, [_tool("cuda-gdb"), "--batch", "-x", str(commands), "--args", *launch], left_s()
        )


def debugger_commands() -> list[str]:
    """Stop in the kernel, then behind the barrier; look at a thread, its warp, and shared memory."""
    line = next(i for i, text in enumerate(MATMUL.read_text().splitlines(), 1) if "// a tile is a part" in text)
    return [
        "set pagination off",
        "set breakpoint pending on",
        "break matmul_tiled",
        "run",
        "info cuda kernels",
        f"break matmul.cu:{line}",
        "continue",
        "pipe info cuda warps | head -6",
        "cuda block (1,0,0) thread (3,2,0)",
        "print blockIdx",
        "print threadIdx",
        "print row",
        "print col",
        "print first",
        "print a_tile[2]",
        "pipe info cuda lanes | head -8",
        "kill",
        "quit",
    ]


def _tool(name: str) -> str:
    return shutil.which(name) or shutil.which(name, path="/usr/local/cuda/bin") or name


def read() -> dict[str, Session]:
    kept = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else []
    return {each["name"]: Session(**each) for each in kept}


def write(sessions: dict[str, Session], path: Path) -> None:
    path.write_text(json.dumps([asdict(each) for each in sessions.values()], indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--gpu", action="store_true", help="what needs a GPU, and only that")
    words.add_argument("--json", type=Path, default=RECORD, help="where to write; the record by default")
    words.add_argument("--merge", type=Path, help="sessions of a GPU to put into the record")
    args = words.parse_args()
    kept = read()
    if args.merge:
        kept |= {each["name"]: Session(**each) for each in json.loads(args.merge.read_text(encoding="utf-8"))}
        write(kept, RECORD)
        return 0
    sessions = {} if args.gpu and args.json != RECORD else kept
    try:
        for session in on_the_gpu() if args.gpu else on_the_cpu():
            sessions[session.name] = session
            last = (session.output.splitlines() or [""])[-1]
            print(f"{session.name:<18} status {session.status}: {last[:90]}", flush=True)
            write(sessions, args.json)
    except (BadInput, subprocess.SubprocessError) as error:  # no driver, no nvcc, or one that fails
        print(f"sessions: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
