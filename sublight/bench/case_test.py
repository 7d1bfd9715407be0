"""What is measured: the ops' own shapes on a GPU, small ones on a CPU, or what is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from sublight.bench.case import CPU_BYTES, Case, cases
from sublight.errors import BadInput
from sublight.limits.run import Machine
from sublight.ops import find

CPU = Machine(kind="cpu", device="a CPU", uuid="cpu-1", driver="6.1", gpu=None)
ADD, SOFTMAX = find("add"), find("softmax")


def shapes_of(found: list[Case]) -> list[tuple[str, str, str, tuple[int, ...]]]:
    return [(case.op.name, case.direction, case.dtype, tuple(case.shape.values())) for case in found]


def test_what_needs_no_kernel_has_no_case() -> None:
    assert shapes_of(cases([ADD, SOFTMAX], CPU, [], ["fp16"], ["bwd"], True)) == [
        ("softmax", "bwd", "float16", (CPU_BYTES // (2 * 4 * 768), 768))  # as a forward pass in float32 fills it
    ]
    assert shapes_of(cases([ADD], CPU, ["8"], [], ["fwd", "bwd"], True)) == [("add", "fwd", "float32", (8,))]


def test_shapes_and_data_types_are_taken_as_asked() -> None:
    found = cases([SOFTMAX], CPU, ["cols=2,rows=1", "3x4"], ["bf16", "float32"], ["fwd"], True)
    assert shapes_of(found) == [
        ("softmax", "fwd", dtype, shape) for shape in ((1, 2), (3, 4)) for dtype in ("bfloat16", "float32")
    ]
    with pytest.raises(BadInput, match="does not fit add"):
        cases([ADD], CPU, ["3x4"], [], ["fwd"], True)
    with pytest.raises(BadInput, match="unknown data type 'fp8'"):
        cases([ADD], CPU, [], ["fp8"], ["fwd"], True)


def test_a_gpu_gets_the_ops_own_shapes_and_a_cpu_small_ones() -> None:
    gpu = replace(CPU, kind="cuda")
    full = cases([SOFTMAX], gpu, [], [], ["fwd"], False)
    assert [case.shape for case in full] == list(SOFTMAX.shapes)
    assert {case.dtype for case in full} == {"bfloat16"}
    quick = cases([SOFTMAX], gpu, [], [], ["fwd"], True)
    assert 0 < len(quick) < len(full) and all(case.shape in SOFTMAX.shapes for case in quick)
    for op in (ADD, SOFTMAX):
        for how in (True, False):
            small = cases([op], CPU, [], [], ["fwd"], how)
            assert small
            assert all(op.cost(case.shape, case.dtype, "fwd").bytes <= CPU_BYTES for case in small)
            assert {case.dtype for case in small} == {"float32"}
