"""`check` as a user's tests call it: planted faults are told with their lines, what is right passes.

What compiles runs in a process of its own: where there is no GPU, this one has Triton's interpreter, which does not.
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
pytest.importorskip("triton")

from sublight.backend.jit import tl, triton
from sublight.errors import BadInput
from sublight.xray import Unexpected, check

KERNELS = """\
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, y_ptr, n, STEP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at * STEP, mask=at < n)
    x = x - tl.sum(x, 0)
    tl.store(y_ptr + at, x, mask=at < n)


@triton.jit
def dot(a_ptr, b_ptr, c_ptr, HOW: tl.constexpr, N: tl.constexpr):
    row, col = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a = tl.load(a_ptr + row * N + col)
    b = tl.load(b_ptr + row * N + col)
    c = tl.dot(a, b, input_precision=HOW)
    tl.store(c_ptr + row * N + col, c)
"""

PTX = """\
.version 8.0
.target sm_80
.address_size 64
.visible .entry turn(.param .u64 p) .reqntid 32, 1, 1
{
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    .shared .align 16 .b8 tile[4096];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, tile;
    mad.lo.s32 %r3, %r1, STRIDE, %r2;
    st.shared.b32 [%r3], %r1;
    bar.sync 0;
    ld.shared.b32 %r4, [%r3];
    ld.param.u64 %rd1, [p];
    mul.wide.s32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    st.global.b32 [%rd3], %r4;
    ret;
}
"""

ASKED = """\
import json, sys
sys.path.insert(0, {folder!r})
from kernels import dot, scale
from sublight.op import BadInput
from sublight.xray import Unexpected, check

SCALE = "x_ptr:*bf16:16, y_ptr:*bf16:16, n:i32:16"
DOT = "a_ptr:*fp32:16, b_ptr:*fp32:16, c_ptr:*fp32:16"
given = dict(signature=SCALE, constants=dict(STEP=1, BLOCK=1024))
launched = dict(arguments=dict(n=4096), grid=(4,))
thin = dict(signature=SCALE, constants=dict(STEP=3, BLOCK=1024))
huge = dict(signature=SCALE, constants=dict(STEP=1, BLOCK=16384, num_warps=1))


def said(kernel, **wanted):
    try:
        pages = check(kernel, **wanted)
    except Unexpected as error:
        return str(error)
    except BadInput as error:
        return f"bad: {{error}}"
    return [page.code.name for page in pages]


def dots(how, **wanted):
    return said(dot, gpu="a100", signature=DOT, constants=dict(HOW=how, N=16), **wanted)


print(json.dumps(dict(
    right=said(scale, **given, **launched, min_load_bytes=16, min_store_bytes=16, tensor_cores=False,
               max_registers=64, min_occupancy=0.5, bank_conflicts=False, uncoalesced=False),
    spill=said(scale, **huge),
    spill_allowed=said(scale, **huge, spills=None),
    narrow=said(scale, **thin, min_load_bytes=4),
    uncoalesced=said(scale, **thin, **launched, uncoalesced=False),
    unlaunched=said(scale, **thin, uncoalesced=False),
    greedy=said(scale, **given, max_registers=8, min_occupancy=1.01),
    cuda_cores=dots("ieee", tensor_cores=True),
    tensor_cores=dots("tf32", tensor_cores=True),
    which=dots("tf32", tensor_cores="HGMMA"),
    conflict=said({folder!r} + "/turn128.ptx", gpu="a100", bank_conflicts=False),
    conflict_allowed=said({folder!r} + "/turn128.ptx", gpu="a100"),
    no_conflict=said({folder!r} + "/turn4.ptx", gpu="a100", bank_conflicts=False),
    file=said({folder!r} + "/kernels.py:scale", signature=SCALE, constants=dict(STEP=1, BLOCK=512)),
    missing=said(scale, signature=SCALE, constants=dict(STEP=1)),
    no_kernel=said(3),
    op=said("softmax:_tile_kernel", gpu="h200", min_load_bytes=16, uncoalesced=False, bank_conflicts=False),
)))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("expect")
    (folder / "kernels.py").write_text(KERNELS)
    for stride in (4, 128):
        (folder / f"turn{stride}.ptx").write_text(PTX.replace("STRIDE", str(stride)))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-c", ASKED.format(folder=str(folder))]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2], env=environment
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_what_is_right_passes_and_gives_its_pages(answers: dict[str, Any]) -> None:
    assert answers["right"] == ["scale"]
    assert answers["file"] == ["scale"]
    assert answers["op"] == ["_tile_kernel"]


def test_a_spill_is_told_with_its_line_unless_allowed(answers: dict[str, Any]) -> None:
    (first, *_) = answers["spill"].splitlines()
    assert first.startswith("scale on h100: spills ") and "bytes a thread, at most 0 allowed (" in first
    assert first.rpartition("kernels.py:")[2] in ("7)", "8)", "9)", "10)"), first
    assert answers["spill_allowed"] == ["scale"]


def test_a_narrow_load_is_told_with_its_line(answers: dict[str, Any]) -> None:
    (told,) = answers["narrow"].splitlines()
    assert "loads of 2 bytes a thread, at least 4 wanted" in told and told.endswith("kernels.py:8)"), told


def test_uncoalesced_access_is_told_and_what_cannot_be_judged_does_not_pass(answers: dict[str, Any]) -> None:
    (told,) = answers["uncoalesced"].splitlines()
    assert "uncoalesced, load: 32 sectors a request where 2 would do" in told and told.endswith("kernels.py:8)"), told
    assert "cannot be looked for" in answers["unlaunched"] and "argument n, which is not given" in answers["unlaunched"]


def test_registers_and_occupancy(answers: dict[str, Any]) -> None:
    registers, occupancy = answers["greedy"].splitlines()
    assert "registers a thread, at most 8 allowed" in registers
    assert occupancy.endswith("at least 1.01 wanted") and "occupancy 1.00" in occupancy


def test_a_dot_on_cuda_cores_is_told(answers: dict[str, Any]) -> None:
    assert answers["cuda_cores"] == "dot on a100: tensor cores wanted, none used"
    assert answers["tensor_cores"] == ["dot"]
    assert answers["which"] == "dot on a100: HGMMA wanted, HMMA used"


def test_a_bank_conflict_is_told_where_none_is_wanted(answers: dict[str, Any]) -> None:
    store, load = answers["conflict"].splitlines()
    assert "bank-conflict, store: 32-way bank conflict, 32 passes a warp where 1 would do" in store
    assert "bank-conflict, load: 32-way bank conflict" in load
    assert answers["conflict_allowed"] == answers["no_conflict"] == ["turn"]


def test_bad_input_is_one_line(answers: dict[str, Any]) -> None:
    assert answers["missing"].startswith("bad: ") and "BLOCK" in answers["missing"]
    assert answers["no_kernel"].startswith("bad: int is no Triton kernel")
    assert all("\n" not in answers[name] for name in ("missing", "no_kernel"))


@triton.jit
def _copy_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at))


def test_under_the_interpreter_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(BadInput, match="TRITON_INTERPRET=1 makes kernels that cannot be compiled: unset it"):
        check(_copy_kernel, signature="x_ptr:*fp32, y_ptr:*fp32", constants={"BLOCK": 128})
    with pytest.raises(BadInput, match="TRITON_INTERPRET=1"):
        check("softmax")
    assert issubclass(Unexpected, AssertionError), "a test that calls it fails, and does not break"
