"""Random Triton kernels: what the engine stores, following their PTX, is what Triton's interpreter stores.

One process compiles and follows, another interprets: which of the two Triton does is decided when it loads.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
KERNELS = 3
ROWS, COLUMNS = 8, 32
STEPS = (  # a, b: integers of one shape; f: floats; every one keeps the shape
    *("a = a * {n} + b", "b = a ^ (b >> {n})", "a = (a.to(tl.uint32, bitcast=True) >> {n}).to(tl.int32, bitcast=True)"),
    *("a = a // {d}", "b = b % {d}", "a = a // (b | 1)", "b = ((a.to(tl.int64) * b.to(tl.int64)) >> {n}).to(tl.int32)"),
    *(
        "a = tl.where(a < b, a, b + {n})",
        "a = tl.minimum(a, b)",
        "b = tl.abs(b // 2)",
        "b = a.to(tl.int8).to(tl.int32)",
    ),
    *("a = tl.cumsum(a, {axis})", "b = b + tl.sum(a, {axis}, keep_dims=True)", "a = tl.sort(a)", "b = tl.flip(b, 1)"),
    *(
        "b = b ^ tl.argmax(a, {axis}, keep_dims=True)",
        "a = tl.gather(a, b & {last}, 1)",
        "a = tl.randint({n}, b).to(tl.int32)",
    ),
    *("a = tl.reshape(a.trans(), ({rows}, {columns}))", "b = tl.max(tl.join(a, b), 2)"),
    *("f = f + a.to(tl.float32) * 2e-10", "f = tl.exp2(f * 0.01) + tl.sqrt(tl.abs(f))", "f = tl.clamp(f, -2.5, 4.0)"),
    *("f = f.to(tl.float16).to(tl.float32)", "a = a + (f * 8).to(tl.int32)", "f = f / (tl.abs(f) + 1.5)"),
    *(
        "for k in range(count):\n        a = a * 5 + k + pid",
        "if pid == 1:\n        b = b * 3 + 1\n    else:\n        b = b - 7",
    ),
)
HEAD = """
@triton.jit
def k{number}(x_ptr, y_ptr, f_ptr, a_ptr, b_ptr, c_ptr, count):
    pid = tl.program_id(0)
    at = tl.arange(0, {rows})[:, None] * {columns} + tl.arange(0, {columns})[None, :]
    a = tl.load(x_ptr + at * {stride}, mask=at % {d} != 0, other={n})
    b = tl.load(y_ptr + at).to(tl.int32)
    f = tl.load(f_ptr + at + {n})
"""
TAIL = """    to = pid * {rows} * {columns} + at
    tl.store(a_ptr + to, a.to(tl.int32))
    tl.store(b_ptr + to, b)
    tl.store(c_ptr + to, f)
"""


def source() -> str:
    """The same kernels every time."""
    choose = random.Random(6)
    text = "import triton\nimport triton.language as tl\n"
    for number in range(KERNELS):
        body = "".join(f"    {step}\n" for step in (*choose.sample(STEPS, 2), *STEPS[number::KERNELS]))
        facts = {
            "number": number,
            "rows": ROWS,
            "columns": COLUMNS,
            "last": COLUMNS - 1,
            "stride": choose.choice((1, 2)),
        }
        for line in (HEAD + body + TAIL).splitlines():
            drawn = {"n": choose.randint(1, 13), "d": choose.choice((3, 5, 8, 31)), "axis": choose.randint(0, 1)}
            text += line.format(**facts, **drawn) + "\n"
    return text


def inputs() -> list[Any]:
    import torch

    draw = torch.Generator().manual_seed(1)
    count = ROWS * COLUMNS
    wide = torch.randint(-(2**31), 2**31 - 1, (2 * count,), generator=draw).to(torch.int32)
    narrow = torch.randint(-128, 127, (count,), generator=draw).to(torch.int8)
    floats = torch.randint(-64, 64, (count + 16,), generator=draw).float() / 8
    outputs = [torch.zeros(2 * count, dtype=kind) for kind in (torch.int32, torch.int32, torch.float32)]
    return [wide, narrow, floats, *outputs, 3]


def followed(jit: Any, arguments: list[Any]) -> list[list[float]]:
    from sublight.backend.record import launch_of
    from sublight.gpus import find
    from sublight.xray.build import code_of
    from sublight.xray.ptx.entry import parse_entry
    from sublight.xray.ptx.machine_test import Silent
    from sublight.xray.ptx.start import start_of
    from sublight.xray.ptx.steps import follow

    code = code_of(launch_of(jit, tuple(arguments), {"num_warps": 2}, grid=(2,), capability=90), find("h100"))
    entry = parse_entry(code.ptx, code.symbol)
    start = start_of(code, entry, blocks=2)
    assert not isinstance(start, str)
    assert follow(entry, start, Silent(), most_steps=10**6) == ()
    result = []
    for name, given in zip(("a_ptr", "b_ptr", "c_ptr"), arguments[3:6], strict=True):
        memory = next(region.memory for region in start.memory.regions if region.name == name)
        assert memory.data is not None and memory.why is None, name
        result.append(memory.data.view(given.numpy().dtype).tolist())
    return result


def answers(folder: str) -> list[list[list[float]]]:
    sys.path.insert(0, folder)
    kernels = __import__("random_kernels")
    result = []
    for number in range(KERNELS):
        jit, arguments = getattr(kernels, f"k{number}"), inputs()
        if os.environ.get("TRITON_INTERPRET") == "1":
            jit[(2,)](*arguments)
            result.append([output.tolist() for output in arguments[3:6]])
        else:
            result.append(followed(jit, arguments))
    return result


def test_what_is_stored(tmp_path: Path) -> None:
    (tmp_path / "random_kernels.py").write_text(source())
    command = [sys.executable, "-m", "sublight.xray.ptx.random_test", str(tmp_path)]
    running = [
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": mode}, text=True, stdout=subprocess.PIPE
        )
        for mode in ("0", "1")
    ]
    engine, interpreter = (json.loads(process.communicate()[0].splitlines()[-1]) for process in running)
    for number, (mine, theirs) in enumerate(zip(engine, interpreter, strict=True)):
        assert mine[:2] == theirs[:2], f"k{number}"
        assert mine[2] == pytest.approx(theirs[2], rel=1e-5, abs=1e-6), f"k{number}"
        assert all(len(set(column)) > 1 for column in mine), "no kernel stores next to nothing"


if __name__ == "__main__":
    print(json.dumps(answers(sys.argv[1])))
