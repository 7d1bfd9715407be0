"""Every kernel compiles for a GPU that is not here; spills, narrow accesses, too much shared memory are not missed.

What compiles runs in a process of its own: where there is no GPU, this one has Triton's interpreter, which does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.backend.jit import tl, triton
from sublight.op import Kernel, Op, Provider
from sublight.ops import OPS, find
from sublight.xray import compile as xray
from sublight.xray import ledger
from sublight.xray.compile import MAX_SHARED_BYTES, TARGETS, Compiled, Launch, kernel_of

ROOT = Path(__file__).parents[2]
H200 = 90


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """With the compiler, not the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )


# ------------------------------------------------------------------------------------------------ all of ours


@pytest.fixture(scope="module")
def report() -> subprocess.CompletedProcess[str]:
    return python("-m", "sublight.xray.compile", "--quick")  # every specialisation: make check-compile


def test_every_kernel_compiles_and_fits(report: subprocess.CompletedProcess[str]) -> None:
    words = ("spills", "bytes of shared", "narrow-")
    problems = [line for line in report.stdout.splitlines() if any(word in line for word in words)]
    assert report.returncode == 0, "\n".join((*problems, report.stderr))


def test_every_kernel_is_listed(report: subprocess.CompletedProcess[str]) -> None:
    *lines, last = [line.split() for line in report.stdout.splitlines() if " not in the ledger" not in line]
    compiled = {(words[0], words[1]) for words in lines if words[0] != "limits"}
    assert compiled == {(op.name, kernel.name) for op in OPS for kernel in op.kernels if H200 in kernel.targets}
    assert "limits" in {words[0] for words in lines}
    assert int(last[2]) == len(lines)
    ones = {op.name for op in OPS if any(1 in shape.values() for shape in op.test_shapes)}
    with_ones = {words[0] for words in lines if {"rows=1", "cols=1", "n=1", "numel=1"} & set(words)}
    assert len(with_ones) > len(ones) / 2, "Triton makes a size of one a constant: those are compiled, too"


def test_a_kernel_that_has_not_changed_is_not_compiled_again(tmp_path: Path) -> None:
    """By the ledger: what went in is hashed, so that another option or source has another key."""
    jit = SimpleNamespace(cache_key="source")
    launch = Launch(kernel="_k", jit=jit, signature={"n": "i32"}, constants={}, aligned=(), options={"num_warps": 4})
    others = (
        dataclasses.replace(launch, options={"num_warps": 8}),
        dataclasses.replace(launch, signature={"n": "i64"}),
        dataclasses.replace(launch, jit=SimpleNamespace(cache_key="another source")),
    )
    keys = [ledger.key_of(each, 90, look_for_narrow=False) for each in (launch, *others)]
    keys += [ledger.key_of(launch, 80, look_for_narrow=False), ledger.key_of(launch, 90, look_for_narrow=True)]
    assert len(set(keys)) == 6
    path = tmp_path / "compiled.json"
    ledger.write({keys[0]: (40, 0, 512, ("narrow-load at x.py:1",))}, path)
    compiler = xray.Compiler(ledger.read(path))
    found = compiler(launch, 90)
    assert (found.registers, found.spill_bytes, found.shared_bytes, compiler.compiled) == (40, 0, 512, 0)
    assert found.narrow == ("narrow-load at x.py:1",)
    path.write_text(path.read_text().replace(ledger._triton(), "0.0"))
    assert ledger.read(path) == {}, "another Triton compiles otherwise"


def test_the_ledger_is_up_to_date(report: subprocess.CompletedProcess[str]) -> None:
    """Where it was written by this Triton: else nothing would be gained by it, in silence."""
    if not ledger.read():
        pytest.skip("written by another version of Triton")
    assert "not in the ledger" not in report.stdout, report.stdout.splitlines()[-2]


# ------------------------------------------------------------------------------------------------ asked elsewhere


def told(launch: Launch) -> dict[str, Any]:
    record = {name: getattr(launch, name) for name in ("kernel", "aligned")}
    record["constexprs"] = [parameter.name for parameter in launch.jit.params if parameter.is_constexpr]
    return record | {name: dict(getattr(launch, name)) for name in ("signature", "constants", "options")}


def softmax_of_4096() -> list[Any]:
    return [told(launch) for launch in xray.launches_of(find("softmax"), ({"rows": 512, "cols": 4096},), H200)]


def odd_numbers() -> list[Any]:
    """Numbers that 16 does not divide, that are one, that pass 2**31, and a float."""
    with xray.recording(H200) as launches:
        x = torch.empty(2, 50257, device="meta")
        find("rms_norm").launch(x, x[0])
        find("softmax").launch(torch.empty(1, 64, device="meta"))
        find("add").launch(*[torch.empty(2**31 + 16, device="meta")] * 2)
    return [told(launch) for launch in launches]


def after_recording() -> list[bool]:
    from triton.runtime.jit import JITFunction

    from sublight.backend.device import PRETEND

    before = JITFunction.run
    try:
        with xray.recording(80):
            inside = PRETEND.get()
            noted = JITFunction.run is not before
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        return [inside is not None and inside.capability == 80, noted, JITFunction.run is before, PRETEND.get() is None]


@triton.jit
def _hoarding_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Needs the whole row after a reduction of it, so a thread must hold its share."""
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place).to(tl.float32)
    tl.store(y_ptr + place, (x - tl.max(x, 0)).to(y_ptr.dtype.element_ty))


def hoarding(*kernels: Kernel) -> Op:
    """128 values a thread, and 32 registers to hold them."""

    def launch(x: torch.Tensor) -> None:
        _hoarding_kernel[(1,)](x, x, BLOCK=4096, num_warps=1, maxnreg=32)

    return dataclasses.replace(
        find("softmax"),
        name="hoard",
        providers={"sublight": Provider(launch=launch, kernels=kernels)},
        shapes=({"rows": 1, "cols": 4096},),
        test_shapes=(),
    )


def planted_spills() -> list[Any]:
    """Undeclared and declared: how much was spilled, and what is said of it."""
    ops = hoarding(Kernel(jit=_hoarding_kernel)), hoarding(Kernel(jit=_hoarding_kernel, spills="planted"))
    found = [list(xray.check((op,), (H200,), thorough=False)) for op in ops]
    return [[(compiled.spill_bytes, problem) for _, compiled, problem in each] for each in found]


@triton.jit
def _every_other_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Two values of 16 bits a thread, with one between that it does not load."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + 2 * place, mask=place < n, other=0.0)
    tl.store(y_ptr + place, x, mask=place < n)


def sparing(cols: tuple[int, ...], narrow: str = "") -> Op:
    """An op of that kernel at those widths."""

    def launch(x: torch.Tensor) -> None:
        _every_other_kernel[(1,)](x, x, x.shape[1] // 2, BLOCK=256, num_warps=4)

    return dataclasses.replace(
        find("softmax"),
        name="spare",
        providers={"sublight": Provider(launch=launch, kernels=(Kernel(jit=_every_other_kernel, narrow=narrow),))},
        test_shapes=(),
        shapes=tuple({"rows": 1, "cols": each} for each in cols),
    )


def planted_narrow_loads() -> list[Any]:
    """Undeclared, declared, and odd: alone, and beside a width that 16 divides."""
    ops = sparing((512,)), sparing((512,), narrow="planted"), sparing((510,)), sparing((510, 512))
    found = [list(xray.check((op,), (H200,), thorough=True)) for op in ops]
    return [[(xray.is_odd(compiled.launch), problem) for _, compiled, problem in each] for each in found]


def wrong_target() -> list[Any]:
    op = hoarding(Kernel(jit=_hoarding_kernel, targets=(120,)))
    return list(xray.check((op,), (H200,), thorough=False))


def exit_status() -> list[Any]:
    """Of the command, where a kernel spills, and what it prints last."""
    from sublight import ops

    kept, printed = ops.OPS, io.StringIO()
    ops.OPS, sys.argv = (hoarding(Kernel(jit=_hoarding_kernel)),), ["compile"]
    try:
        with contextlib.redirect_stdout(printed):
            xray.main()
    except SystemExit as left:
        return [left.code, printed.getvalue().splitlines()[-1]]
    finally:
        ops.OPS = kept
    return []


def unlisted_kernel() -> str:
    try:
        list(xray.check((hoarding(),), (H200,), thorough=False))
    except LookupError as error:
        return str(error)
    return "nothing was said"


QUESTIONS = (
    softmax_of_4096,
    odd_numbers,
    after_recording,
    planted_spills,
    planted_narrow_loads,
    wrong_target,
    exit_status,
    unlisted_kernel,
)


def answer_all() -> None:
    """In the other process: every question's answer, or its traceback, as JSON."""
    xray.limit_launches = lambda target: []  # compiled above
    given: dict[str, Any] = {}
    for question in QUESTIONS:
        try:
            given[question.__name__] = question()
        except Exception:
            given[question.__name__] = traceback.format_exc()
    print(json.dumps(given))


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    done = python("-c", "from sublight.xray import compile_test; compile_test.answer_all()")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_a_launch_is_recorded_with_its_types_and_constants(answers: dict[str, Any]) -> None:
    found = answers["softmax_of_4096"]
    assert [(launch["kernel"], launch["signature"]["y_ptr"]) for launch in found] == [
        (kernel, pointer) for pointer in ("*bf16", "*fp32") for kernel in ("_row_kernel", "_row_backward_kernel")
    ]
    for launch in found:
        assert set(launch["constants"]) == set(launch["constexprs"]), "no size is one"
        assert launch["constants"]["BLOCK"] == 4096
        assert set(launch["aligned"]) == set(launch["signature"]), "16 divides 4096"
        assert launch["options"]["num_warps"] in (1, 2, 4, 8, 16, 32)
        pointer = launch["signature"]["y_ptr"]
        for name, kind in launch["signature"].items():
            assert kind == (pointer if name.endswith("_ptr") else "i32"), name
        assert pointer == "*bf16" or launch["constants"]["PACKED"] is False, "there is no pair in 32 bits"


def test_numbers_are_specialised_as_triton_does(answers: dict[str, Any]) -> None:
    norm, softmax, add = answers["odd_numbers"]
    assert (norm["signature"]["cols"], norm["signature"]["eps"]) == ("i32", "fp32")
    assert "cols" not in norm["aligned"] and "x_ptr" in norm["aligned"]
    assert softmax["constants"]["rows"] == 1 and "rows" not in softmax["signature"]
    assert softmax["signature"]["cols"] == "i32"
    assert add["signature"]["n"] == "i64" and "n" in add["aligned"]


def test_recording_ends_whatever_happens(answers: dict[str, Any]) -> None:
    assert answers["after_recording"] == [True] * 4


def test_a_planted_spill_is_reported_unless_it_is_declared(answers: dict[str, Any]) -> None:
    undeclared, declared = answers["planted_spills"]
    assert len(undeclared) == 2, "one for each data type"
    for spill_bytes, problem in undeclared:
        assert spill_bytes > 0
        assert problem == f"spills {spill_bytes} bytes a thread"
    assert declared == [[spill_bytes, ""] for spill_bytes, _ in undeclared]


def test_a_planted_narrow_load_is_reported_unless_it_is_explained(answers: dict[str, Any]) -> None:
    line = _every_other_kernel.fn.__code__.co_firstlineno + 4
    problem = f"narrow-load at compile_test.py:{line}"
    undeclared, declared, odd, both = answers["planted_narrow_loads"]
    assert undeclared == [[False, problem], [False, ""]], "fp32 is wide enough"
    assert declared == [[False, ""], [False, ""]]
    assert odd[0] == [True, f"{problem}, narrow-store at compile_test.py:{line + 1}"], "no other width is judged"
    assert both == [[True, ""], [True, ""], [False, problem], [False, ""]], "the width that 16 divides is"


def test_a_kernel_is_compiled_for_its_own_targets_only(answers: dict[str, Any]) -> None:
    assert answers["wrong_target"] == []


def test_the_command_fails_where_a_kernel_spills(answers: dict[str, Any]) -> None:
    assert answers["exit_status"] == [1, "0 of 2 kernels compile, fit, and have no spill or narrow access unexplained"]


def test_a_launch_of_an_unlisted_kernel_is_found(answers: dict[str, Any]) -> None:
    assert answers["unlisted_kernel"] == "hoard launches _hoarding_kernel, which its record does not list"


# ------------------------------------------------------------------------------------------------ what is a problem


def compiled(*, spill: int = 0, shared: int = 0, target: int = H200, narrow: tuple[str, ...] = ()) -> Compiled:
    launch = Launch(kernel="_k", jit=None, signature={}, constants={}, aligned=(), options={})
    return Compiled(launch=launch, target=target, registers=32, spill_bytes=spill, shared_bytes=shared, narrow=narrow)


@pytest.mark.parametrize("target", TARGETS)
def test_what_just_fits_is_no_problem(target: int) -> None:
    assert compiled(shared=MAX_SHARED_BYTES[target], target=target).problem() == ""


def test_a_spill_and_a_narrow_access_are_problems_unless_explained() -> None:
    both = compiled(spill=8, narrow=("narrow-load at x.py:1", "narrow-store at x.py:2"))
    spills, narrow = "spills 8 bytes a thread", "narrow-load at x.py:1, narrow-store at x.py:2"
    assert both.problem() == both.problem(Kernel(jit=None)) == f"{spills}; {narrow}"
    assert both.problem(Kernel(jit=None, spills="why")) == narrow
    assert both.problem(Kernel(jit=None, narrow="why")) == spills
    assert both.problem(Kernel(jit=None, spills="why", narrow="why")) == ""


@pytest.mark.parametrize(("target", "gpu"), [(80, "a100"), (90, "h200"), (100, "b200"), (120, "rtx5090")])
def test_too_much_shared_memory_is_a_problem_that_no_declared_spill_hides(target: int, gpu: str) -> None:
    much = MAX_SHARED_BYTES[target]
    problem = compiled(shared=much + 1, target=target, spill=8).problem(Kernel(jit=None, spills="why", narrow="why"))
    assert problem == f"{much + 1} bytes of shared memory, {gpu} has {much}"


def test_the_record_behind_a_launch() -> None:
    softmax = find("softmax")
    assert kernel_of(softmax, softmax.kernels[1].name) is softmax.kernels[1]
    with pytest.raises(LookupError, match="add launches _row_kernel, which its record does not list"):
        kernel_of(find("add"), "_row_kernel")
