"""Scripts that were written for a GPU are recorded without one, unmodified: each asks for what tutorials ask for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[3]
HEAD = """\
import torch, triton
import triton.language as tl

DEVICE = triton.runtime.driver.active.get_active_torch_device()

@triton.jit
def total(x_ptr, y_ptr, n, BLOCK: tl.constexpr, num_stages: tl.constexpr = 1):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr, tl.sum(tl.load(x_ptr + at, mask=at < n, other=0.0)))

def call(x, BLOCK=1024, **options):
    y = torch.empty(1, device=x.device)
    total[(1,)](x, y, x.numel(), BLOCK, **options)
    return y
"""
SCRIPTS = {
    "facts": """
assert torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
properties = triton.runtime.driver.active.utils.get_device_properties(DEVICE.index)
assert properties["multiprocessor_count"] == torch.cuda.get_device_properties("cuda").multi_processor_count
assert properties["max_threads_per_sm"] == 2048 and properties["max_num_regs"] == 65536
x = torch.randn(100, device="cuda", generator=torch.Generator("cuda"))
y = call(x)
assert x.is_cuda and y.is_cuda and y.device == x.device == DEVICE
torch.cuda.synchronize()
print("to the end")
""",
    "occupied": """
x, y = torch.ones(100, device=DEVICE), torch.empty(1, device=DEVICE)
compiled = total.warmup(x, y, 100, BLOCK=1024, num_stages=2, num_warps=8, grid=(1,))
compiled._init_handles()
blocks = min(65536 // (compiled.n_regs * 32 * 8), 232448 // compiled.metadata.shared)
compiled[(blocks, 1, 1)](x, y, 100, 1024, 2)
print("to the end")
""",
    "compared": """
y = call(torch.ones(100, device="cuda"))
assert torch.allclose(y, torch.full_like(y, 100.0))
torch.testing.assert_close(y, torch.full_like(y, 100.0))
call(torch.ones(100, device="cuda"), BLOCK=256)
print("to the end")
""",
    "benchmarked": """
@triton.testing.perf_report(triton.testing.Benchmark(
    x_names=["n"], x_vals=[128, 1 << 40], line_arg="block", line_vals=[128, 256], line_names=["a", "b"],
    plot_name="", args={}))
def benchmark(n, block):
    ms, low, high = triton.testing.do_bench(lambda: call(torch.ones(n, device="cuda"), block), quantiles=[.5, .2, .8])
    return n / ms, n / low, n / high
benchmark.run(show_plots=True, print_data=True)
print("to the end")
""",
    "benchmarked_after": """
@triton.testing.perf_report(triton.testing.Benchmark(
    x_names=["n"], x_vals=[128], line_arg="block", line_vals=[128], line_names=["a"], plot_name="", args={}))
def benchmark(n, block):
    raise AssertionError("the script's own launches are enough")
call(torch.ones(100, device="cuda"))
benchmark.run()
print("to the end")
""",
    "on_another_gpu": """
if torch.cuda.get_device_capability()[0] >= 10:
    call(torch.ones(100, device="cuda"))
""",
    "in_a_thread": """
import threading
def work():
    call(torch.ones(100, device="cuda"))
thread = threading.Thread(target=work)
thread.start()
thread.join()
print("to the end")
""",
}
ASK = """
import json, sys
from sublight.errors import BadInput
from sublight.gpus import find
from sublight.xray.inputs.recorded import record
import torch
before = torch.cuda.is_available, torch.testing.assert_close, torch.Generator
answers = {}
for file in sys.argv[1:]:
    said = []
    try:
        launches = record(file, gpu=find("h100"), tell=said.append)
    except BadInput as error:
        answers[file] = {"bad": str(error), "said": said}
        continue
    answers[file] = {
        "launches": [[each.kernel, list(each.grid), each.constants["BLOCK"], dict(each.options)] for each in launches],
        "said": said,
    }
assert before == (torch.cuda.is_available, torch.testing.assert_close, torch.Generator), "not put back"
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All scripts in one process, without the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: nothing is pretended")
    folder = tmp_path_factory.mktemp("scripts")
    for name, source in SCRIPTS.items():
        (folder / f"{name}.py").write_text(HEAD + source, encoding="utf-8")
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), own.get("PYTHONPATH", "")])
    words = [sys.executable, "-c", ASK, *(f"{name}.py" for name in SCRIPTS)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=folder, env=own)
    assert done.returncode == 0, done.stderr
    return {Path(name).stem: answer for name, answer in json.loads(done.stdout).items()}


@pytest.mark.parametrize(
    ("name", "blocks"),
    [("facts", [1024]), ("compared", [1024, 256]), ("benchmarked", [128, 256]), ("benchmarked_after", [1024])],
)
def test_what_a_script_launches_is_noted(answers: dict[str, Any], name: str, blocks: list[int]) -> None:
    answer = answers[name]
    assert [block for _, _, block, _ in answer["launches"]] == blocks
    assert answer["said"] == [
        "no GPU here, h100 is pretended: launches are noted and not made, so results mean nothing"
    ]


def test_threads_see_the_same_machine(answers: dict[str, Any]) -> None:
    assert len(answers["in_a_thread"]["launches"]) == 1


def test_a_grid_made_of_registers_is_that_of_the_compiled_kernel(answers: dict[str, Any]) -> None:
    """And compiling ahead is no launch."""
    [[kernel, grid, _, options]] = answers["occupied"]["launches"]
    assert kernel == "total" and options["num_warps"] == 8
    assert 1 < grid[0] <= 65536 // (8 * 32 * 8) and grid[1:] == [1, 1]


def test_a_script_for_another_gpu_says_which_was_pretended(answers: dict[str, Any]) -> None:
    assert "launches no Triton kernel on h100" in answers["on_another_gpu"]["bad"]
    assert "--gpu" in answers["on_another_gpu"]["bad"]
