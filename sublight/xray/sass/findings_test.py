"""Planted kernels, compiled for GPUs that are not here: each fault is found at its line, and nowhere else.

What compiles runs in a process of its own: where there is no GPU, this one has Triton's interpreter, which does not.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight.backend.jit import tl, triton
from sublight.gpus import find
from sublight.xray import binary
from sublight.xray.record import Code, Finding, Resources
from sublight.xray.sass.findings import by_line, code_findings
from sublight.xray.sass.instruction import parse
from sublight.xray.sass.mix import mix, tensor_core

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).name
GPUS = {80: "a100", 89: "rtx4090", 90: "h200", 100: "b200", 120: "rtx5090"}

# ------------------------------------------------------------------------------------------------ planted


@triton.jit
def _dot_kernel(a_ptr, b_ptr, c_ptr, depth, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    place = tl.arange(0, 64)
    step = tl.arange(0, BLOCK)
    total = tl.zeros((64, 64), tl.float32)
    for start in range(0, depth, BLOCK):  # the loop
        a = tl.load(a_ptr + place[:, None] * depth + (start + step)[None, :])
        b = tl.load(b_ptr + (start + step)[:, None] * 64 + place[None, :])
        total = tl.dot(a, b, total, input_precision=PRECISION)  # the dot
    tl.store(c_ptr + place[:, None] * 64 + place[None, :], total)


@triton.jit
def _every_second_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + 2 * place)  # every second
    tl.store(y_ptr + place, x + 1)


@triton.jit
def _scattered_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(y_ptr + 2 * place, tl.load(x_ptr + place))  # scattered


@triton.jit
def _one_value_kernel(x_ptr, scale_ptr, y_ptr, rows, BLOCK: tl.constexpr):
    """A scale for each row, of two bytes, is right; so is one value a thread."""
    place = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(rows):
        total += tl.load(x_ptr + row * BLOCK + place).to(tl.float32) * tl.load(scale_ptr + row)
    tl.store(y_ptr + place, total.to(y_ptr.dtype.element_ty))
    tl.store(y_ptr + BLOCK + tl.arange(0, 128), tl.load(x_ptr + tl.arange(0, 128)))


@triton.jit
def _hoarding_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place)
    tl.store(y_ptr + place, x - tl.max(x, 0))  # hoarded


@triton.jit
def _double_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place).to(tl.float64)
    tl.store(y_ptr + place, (x * x * x).to(tl.float32))  # doubled


@triton.jit
def _hash_kernel(x_ptr, y_ptr, turns, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place)
    for _ in range(turns):  # hashed
        x = (x ^ (x >> 7)) & 0x7FFFFF7F
        x = (x ^ (x << 5)) | 0x11
        x = (x >> 3) ^ 0x55
    tl.store(y_ptr + place, x)


DOT = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32", "depth": "i32"}
IEEE = {"a_ptr": "*fp32", "b_ptr": "*fp32", "c_ptr": "*fp32", "depth": "i32"}
COPY = {"x_ptr": "*bf16", "y_ptr": "*bf16"}
FP32 = {"x_ptr": "*fp32", "y_ptr": "*fp32"}
FP64 = {"x_ptr": "*fp64", "y_ptr": "*fp32"}
SCALED = {"x_ptr": "*bf16", "scale_ptr": "*bf16", "y_ptr": "*bf16", "rows": "i32"}
HASH = {"x_ptr": "*i32", "y_ptr": "*i32", "turns": "i32"}
PLANTED: dict[str, tuple[Any, dict[str, str], dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "dot": (_dot_kernel, DOT, {"BLOCK": 64, "PRECISION": "ieee"}, {}, (80, 89, 90, 100, 120)),
    "ieee": (_dot_kernel, IEEE, {"BLOCK": 16, "PRECISION": "ieee"}, {}, (90,)),
    "tf32": (_dot_kernel, IEEE, {"BLOCK": 32, "PRECISION": "tf32"}, {}, (80,)),
    "every second": (_every_second_kernel, COPY, {"BLOCK": 1024}, {}, (90, 120)),
    "scattered": (_scattered_kernel, COPY, {"BLOCK": 1024}, {}, (90,)),
    "one value": (_one_value_kernel, SCALED, {"BLOCK": 1024}, {}, (90,)),
    "hoarding": (_hoarding_kernel, FP32, {"BLOCK": 2048}, {"num_warps": 1, "maxnreg": 32}, (90,)),
    "double": (_double_kernel, FP32, {"BLOCK": 1024}, {}, (90,)),
    "double by type": (_double_kernel, FP64, {"BLOCK": 1024}, {}, (90,)),
    "hash": (_hash_kernel, HASH, {"BLOCK": 1024}, {}, (90,)),
}


def compile_all() -> None:
    """In the other process: SASS, TTGIR and usage of every planted kernel, as JSON."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_source

    from sublight.xray.sass.asm_lines import right_lines

    given: dict[str, Any] = {}
    for name, (jit, signature, constants, options, targets) in PLANTED.items():
        words = {argument: signature.get(argument, "constexpr") for argument in jit.arg_names}
        attrs = {(jit.arg_names.index(argument),): [["tt.divisibility", 16]] for argument in signature}
        for target in targets:
            source = ASTSource(jit, words, constants, attrs=attrs)
            kernel = compile_source(source, target=GPUTarget("cuda", target, 32), options=options)
            (sass,) = binary.disassemble(kernel.asm["cubin"]).values()
            (used,) = binary.usage(kernel.asm["cubin"]).values()
            given[f"{name} {target}"] = {
                "sass": sass,
                "ttgir": kernel.asm["ttgir"],
                "ptx": kernel.asm["ptx"],
                "used": used,
            }
    jit, signature, constants, _, _ = PLANTED["every second"]
    with right_lines():
        kernel = compile_source(
            ASTSource(jit, {**signature, "BLOCK": "constexpr"}, constants), target=GPUTarget("cuda", 90, 32)
        )
    print(json.dumps({**given, "mended": list(binary.disassemble(kernel.asm["cubin"]).values())}))


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = "from sublight.xray.sass import findings_test; findings_test.compile_all()"
    done = subprocess.run(
        [sys.executable, "-c", words], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def compiled(answers: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in answers.items() if name != "mended"}


def resources(used: dict[str, int]) -> Resources:
    return Resources(
        registers=used["REG"],
        spill_bytes=used["STACK"],
        stack_bytes=used["STACK"],
        static_shared_bytes=0,
        dynamic_shared_bytes=0,
        barriers=0,
        threads=None,
    )


def code(compiled: dict[str, Any], name: str, target: int) -> Code:
    result = compiled[f"{name} {target}"]
    return Code(
        name=name,
        symbol=name,
        gpu=find(GPUS[target]),
        resources=resources(result["used"]),
        sass=result["sass"],
        ptx=result["ptx"],
        ttgir=result["ttgir"],
        file=HERE,
        signature=PLANTED[name][1],
    )


def line_with(comment: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"  # {comment}"))


def told(code: Code) -> list[tuple[str, int | None]]:
    return [(finding.id, finding.place.line if finding.place else None) for finding in code_findings(code)]


def only(code: Code) -> Finding:
    (finding,) = code_findings(code)
    return finding


# ------------------------------------------------------------------------------------------------ real code parsed


def test_counts_agree_with_a_count_of_the_text(compiled: dict[str, Any]) -> None:
    """Of every kernel and target: by opcode, over what the text shows before the padding."""
    for name, each in compiled.items():
        body = re.split(r"/\*[0-9a-f]+\*/\s+BRA `\((\.L_x_\d+)\);", each["sass"])[0]
        counted: dict[str, int] = {}
        for opcode in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/ +(?:@\S+ +)?(\S+)", body, re.MULTILINE):
            counted[opcode] = counted.get(opcode, 0) + 1
        found: dict[str, int] = {}
        for instruction in parse(each["sass"]):
            found[instruction.name] = found.get(instruction.name, 0) + 1
        assert found == counted, name
        assert all(instruction.places for instruction in parse(each["sass"])), name


def test_no_instruction_is_unknown(compiled: dict[str, Any]) -> None:
    for name in compiled:
        kernel, _, target = name.rpartition(" ")
        assert "other" not in mix(code(compiled, kernel, int(target))).counts, name


@pytest.mark.parametrize(
    ("name", "target", "expected"),
    [
        ("dot", 80, "HMMA"),
        ("dot", 89, "HMMA"),
        ("dot", 90, "HGMMA"),
        ("dot", 100, "UTCHMMA"),
        ("dot", 120, "HMMA"),
        ("tf32", 80, "HMMA"),
        ("ieee", 90, None),
        ("hash", 90, None),
    ],
)
def test_tensor_cores(compiled: dict[str, Any], name: str, target: int, expected: str | None) -> None:
    assert tensor_core(code(compiled, name, target)) == expected


@pytest.mark.parametrize("target", [80, 89, 90, 120])
def test_the_loop_of_the_dot(compiled: dict[str, Any], target: int) -> None:
    """One turn is 64 x 64 x 64 over four warps: the shape of each instruction says how many there must be."""
    (loop,) = mix(code(compiled, "dot", target)).loops
    assert loop.place is not None and loop.place.line == line_with("the loop")
    multiply_adds = 64 * 64 * 16 // 4 if target == 90 else 16 * 8 * 16  # of a warp's share of an HGMMA, or of an HMMA
    assert loop.counts["tensor core"] == 64 * 64 * 64 // 4 // multiply_adds
    rate = find(GPUS[target]).flops_per_clock_per_sm["bf16"]
    assert loop.clocks["tensor core"] == 2 * 64 * 64 * 64 / rate, "four warps, a quarter of the SM each"


def test_the_fma_of_a_dot_on_cuda_cores(compiled: dict[str, Any]) -> None:
    (loop,) = mix(code(compiled, "ieee", 90)).loops
    assert loop.counts["fp32"] == 64 * 64 * 16 // 128, "multiply-adds over the threads"
    assert loop.untimed == ()


def test_triton_can_be_made_to_give_the_right_lines(answers: dict[str, Any]) -> None:
    (sass,) = answers["mended"]
    loads = [each for each in parse(sass) if each.opcode == "LDG"]
    assert {each.places[0].line for each in loads} == {line_with("every second")}


def test_instructions_by_line(compiled: dict[str, Any]) -> None:
    counted = by_line(code(compiled, "every second", 90))
    assert counted[line_with("every second")]["global load"] == 8
    assert counted[line_with("every second") + 1]["global store"] == 1


# ------------------------------------------------------------------------------------------------ findings


@pytest.mark.parametrize(
    ("gpu", "faster"),
    [
        ("h200", 'input_precision="tf32" would take the tensor cores, 8 times as fast'),
        ("rtx4090", "fp16 inputs would take the tensor cores, 2 times as fast"),  # tf32 is no faster than fp32 there
    ],
)
def test_a_dot_on_cuda_cores(compiled: dict[str, Any], gpu: str, faster: str) -> None:
    finding = only(dataclasses.replace(code(compiled, "ieee", 90), gpu=find(gpu)))
    assert (finding.id, finding.place and finding.place.line) == ("dot-on-cuda-cores", line_with("the dot"))
    assert faster in finding.detail
    assert not finding.is_information


@pytest.mark.parametrize(("name", "target"), [("dot", 80), ("dot", 90), ("dot", 100), ("dot", 120), ("tf32", 80)])
def test_a_dot_on_tensor_cores_is_no_finding(compiled: dict[str, Any], name: str, target: int) -> None:
    assert told(code(compiled, name, target)) == []


def test_layout_and_instructions_must_both_say_so(compiled: dict[str, Any]) -> None:
    plain, fast = code(compiled, "ieee", 90), code(compiled, "dot", 80)
    assert told(dataclasses.replace(plain, ttgir=re.sub(r", #blocked\w*> loc", ", #mma> loc", plain.ttgir))) == []
    assert told(dataclasses.replace(fast, ttgir=fast.ttgir.replace(", #mma> loc", ", #blocked> loc"))) == []


@pytest.mark.parametrize("target", [90, 120])
def test_narrow_loads(compiled: dict[str, Any], target: int) -> None:
    finding = only(code(compiled, "every second", target))
    assert (finding.id, finding.place and finding.place.line) == ("narrow-load", line_with("every second"))
    assert "2 bytes wide: 8 a thread, 16 bytes in all" in finding.detail, "1024 values, 128 threads"


def test_narrow_stores(compiled: dict[str, Any]) -> None:
    finding = only(code(compiled, "scattered", 90))
    assert (finding.id, finding.place and finding.place.line) == ("narrow-store", line_with("scattered"))
    assert "these stores are 2 bytes wide: 8 a thread" in finding.detail


def test_one_value_for_all_and_one_value_a_thread_are_no_findings(compiled: dict[str, Any]) -> None:
    made = code(compiled, "one value", 90)
    assert re.search(r"LDG\.E\.U16", made.sass), "such loads are there"
    assert [finding for finding in code_findings(made) if not finding.is_information] == []


def test_a_spill(compiled: dict[str, Any]) -> None:
    made = code(compiled, "hoarding", 90)
    finding = only(made)
    assert finding.id == "spill"
    assert finding.place is not None and abs(finding.place.line - line_with("hoarded")) <= 1
    stores, loads = (len(re.findall(rf"\b{opcode}\b", made.sass)) for opcode in ("STL", "LDL"))
    assert f"{made.resources.stack_bytes} bytes a thread do not fit in 32 registers" in finding.detail
    assert f"{stores} stores and {loads} loads" in finding.detail


def test_doubles_without_a_double_argument_are_worth_a_word(compiled: dict[str, Any]) -> None:
    finding = only(code(compiled, "double", 90))
    assert (finding.id, finding.place and finding.place.line) == ("fp64-arithmetic", line_with("doubled"))
    assert finding.is_information
    assert "16 double-precision instructions, 2 times as slow" in finding.detail, "two for each of a thread's 8"
    assert told(code(compiled, "double by type", 90)) == []


def test_a_loop_of_integers_is_worth_a_word(compiled: dict[str, Any]) -> None:
    finding = only(code(compiled, "hash", 90))
    assert (finding.id, finding.place and finding.place.line) == ("integer-overhead", line_with("hashed"))
    assert finding.is_information


def test_a_stack_that_nothing_touches(compiled: dict[str, Any]) -> None:
    made = code(compiled, "dot", 90)
    finding = only(dataclasses.replace(made, resources=resources({"REG": 32, "STACK": 8})))
    assert (finding.id, finding.place, finding.is_information) == ("local-array", None, True)
