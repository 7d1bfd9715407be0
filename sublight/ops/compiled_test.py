"""Our main kernels, held by `xray.check` to what they were written for; nothing here needs a GPU.

Asked in a process of its own: where there is no GPU, this one has Triton's interpreter, which compiles nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
WIDE = {"spills": 0, "min_load_bytes": 16, "min_store_bytes": 16, "uncoalesced": False, "bank_conflicts": False}
LAST_CHUNK = {"spills": 0, "bank_conflicts": False}  # of a tensor: its mask comes out of memory, so elements go singly
ODD = {"spills": 0, "uncoalesced": False, "bank_conflicts": False}
OLD_SUMS = triton.__version__.startswith(("3.5", "3.6"))  # whose tl.sum over warps has conflicts of its own (1.5-way)
EVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax:_row_kernel": ("64x4096", WIDE),
    "rms_norm:_row_kernel": ("64x4096", WIDE),
    "layer_norm:_row_kernel": ("64x4096", WIDE),
    "rope:_rope_kernel": ("1x64x8x2x128", WIDE),
    "swiglu:_gated_kernel": ("64x4096", WIDE),
    "cross_entropy:_row_kernel": ("64x4096", {**WIDE, "min_store_bytes": 0}),  # a row's loss is one number
    "adamw:_update_kernel": ("2x4096", LAST_CHUNK),
}
CASES: dict[str, tuple[str, str, str, str, dict[str, Any]]] = {
    **{
        f"{k} {gpu}": (k, gpu, shape, "bf16", wanted) for k, (shape, wanted) in EVEN.items() for gpu in ("h200", "a100")
    },
    "rms_norm odd": ("rms_norm:_row_kernel", "h200", "64x1000", "fp32", ODD),
    "bias_gelu odd": ("bias_gelu:_bias_gelu_kernel", "h200", "64x1000", "fp32", ODD),
    "cumsum odd": ("cumsum:_columns_kernel", "h200", "64x1000", "fp32", {**ODD, "bank_conflicts": OLD_SUMS}),
    "wrong": ("rms_norm:_row_kernel", "h200", "64x1000", "fp32", WIDE),
}


def answer_all() -> None:
    """In the other process: what is wrong with each, empty where nothing is."""
    from sublight.gpus import find
    from sublight.xray import Unexpected, check
    from sublight.xray.inputs.load import load

    told: dict[str, str] = {}
    for name, (kernel, gpu, shape, dtype, wanted) in CASES.items():
        told[name] = ""
        for code in load(kernel, [find(gpu)], shape=shape, dtype=dtype):
            try:
                check(code, **wanted)
            except Unexpected as wrong:
                told[name] += str(wrong)
    print(json.dumps(told))


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", "from sublight.ops import compiled_test; compiled_test.answer_all()"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kernel", EVEN)
@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_at_even_widths_a_lane_moves_16_bytes_at_once(kernel: str, gpu: str, answers: dict[str, str]) -> None:
    assert answers[f"{kernel} {gpu}"] == ""


@pytest.mark.parametrize("name", [name for name in CASES if " odd" in name])
def test_at_odd_widths_lanes_take_neighbours(name: str, answers: dict[str, str]) -> None:
    assert answers[name] == ""


def test_what_is_not_so_is_told(answers: dict[str, str]) -> None:
    assert "loads of 4 bytes a thread, at least 16 wanted" in answers["wrong"]
    assert "stores of 4 bytes a thread, at least 16 wanted" in answers["wrong"]
