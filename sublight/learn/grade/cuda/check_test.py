"""CUDA C++ submissions: starters fail, solutions pass, and every kind of mistake is named at its line."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass

import pytest

pytest.importorskip("torch")
if not shutil.which("g++") or not shutil.which("addr2line"):
    pytest.skip("CUDA C++ is played with g++", allow_module_level=True)

from sublight.gpus import find as find_gpu
from sublight.learn.exercises import CUDA_EXERCISES, find
from sublight.learn.grade.cuda import check as checking
from sublight.learn.grade.cuda.check import NO_NVCC, PLAYED
from sublight.learn.verdict import Verdict

RIGHT_BUT_SLOW = ("multiply_add.cu", "blocks.cu", "transpose.cu", "matmul.cu")
LAUNCH = """
void add(const float* x, const float* y, float* out, int n) {
    add_kernel<<<(n + 255) / 256, 256>>>(x, y, out, n);
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A body of the kernel, or a whole file, and the words that name what is wrong."""

    name: str
    body: str
    kind: str
    word: str
    line: int = 0  # 0: of no line
    launch: str = LAUNCH


MISTAKES = (
    Mistake(name="no mask", body="out[i] = x[i] + y[i];", kind="kernel", word="out-of-bounds", line=3),
    Mistake(name="before the start", body="if (i < n) out[i] = x[i - 1] + y[i];", kind="kernel", word="before x[0]",
            line=3),
    Mistake(name="an input written", body="if (i < n) ((float*)x)[i] = out[i] = x[i] + y[i];", kind="kernel",
            word="input-written", line=3),
    Mistake(name="a race", body="if (i < n) out[i / 2] = x[i] + y[i];", kind="kernel", word="race", line=3),
    Mistake(name="what nobody wrote", body="if (i < n) out[i] = out[i] + x[i] + y[i];", kind="kernel",
            word="uninitialised-read", line=3),
    Mistake(name="no barrier", kind="kernel", word="shared-race", line=3, body=(
        "__shared__ float part[256]; part[threadIdx.x] = i < n ? x[i] : 0;\n"
        "    if (i < n) out[i] = part[threadIdx.x ^ 32] + y[i];")),
    Mistake(name="shared memory that nobody wrote", kind="kernel", word="shared-uninitialised", line=3,
            body="__shared__ float part[256]; if (i < n) out[i] = part[threadIdx.x] + y[i];"),
    Mistake(name="a barrier that some pass by", kind="kernel", word="barriers",
            body="if (threadIdx.x < 5) __syncthreads(); else __syncwarp(); if (i < n) out[i] = x[i] + y[i];"),
    Mistake(name="too many threads", body="if (i < n) out[i] = x[i] + y[i];", kind="kernel", word="bad-launch",
            launch=LAUNCH.replace("256>>>", "2048>>>"), line=6),
    Mistake(name="the host computes", kind="kernel", word="host-access", line=6, body="", launch=(
        "\nvoid add(const float* x, const float* y, float* out, int n) {\n"
        "    add_kernel<<<1, 1>>>(x, y, out, n); for (int i = 0; i < n; ++i) out[i] = x[i] + y[i];\n}\n")),
    Mistake(name="four at once, anywhere", kind="kernel", word="misaligned", line=3, body=(
        "if (i < n - 4) { float4 v = *(const float4*)(x + i); out[i] = v.x + y[i]; } "
        "else if (i < n) out[i] = x[i] + y[i];")),
    Mistake(name="no semicolon", body="out[i] = x[i]", kind="compile", word="expected", line=3),
    Mistake(name="a library's header", body="", kind="scan", word="#include <thrust/sort.h>", line=8,
            launch=f"{LAUNCH}#include <thrust/sort.h>\n"),
    Mistake(name="one code for each compiler", kind="scan", word="#ifdef", line=4, body=(
        "\n#ifdef __CUDACC__\n#endif\n")),
    Mistake(name="a compiler's version", kind="scan", word="__cplusplus", line=3,
            body="if (__cplusplus > 201703L && i < n) out[i] = x[i] + y[i];"),
    Mistake(name="the host copies", kind="scan", word="memcpy", line=6, body="", launch=(
        "\nvoid add(const float* x, const float* y, float* out, int n) {\n    memcpy(out, x, 4 * n);\n}\n")),
    Mistake(name="past the watch", kind="scan", word="__attribute__", line=3,
            body="__attribute__((no_sanitize(\"thread\"))) int j = i;"),
    Mistake(name="code at loading", kind="scan", word="__attribute__", line=5, body="",
            launch="\n__attribute__((constructor)) static void first() {}\nvoid add(const float*, const float*);\n"),
    Mistake(name="an endless loop", kind="limit", word="does a loop never end",
            body="while (i >= 0) { i = i + 1 - 1; }"),
    Mistake(name="results kept from call to call", kind="values", word="expected",
            body="if (i < n) out[i] = x[i] + y[i];",
            launch=("\nvoid add(const float* x, const float* y, float* out, int n) {\n"
                    "    static const float* first = x; "
                    "add_kernel<<<(n + 255) / 256, 256>>>(first == x ? x : y, y, out, n);\n}\n")),
    Mistake(name="another signature", body="", kind="compile", word="keep the starter's signature",
            launch="\nvoid add(float* x) { add_kernel<<<1, 1>>>(x, x, x, 0); }\n"),
    Mistake(name="less at the goal's size", body="if (i < n) out[i] = x[i] + y[i];", kind="launch", word="left out",
            launch=LAUNCH.replace("(n + 255) / 256", "n > 1000000 ? n / 512 : (n + 255) / 256")),
)  # fmt: skip


def checked(name: str, source: str) -> Verdict:
    return checking.check(find(name), source, gpu=find_gpu("h200"))


@pytest.mark.parametrize("name", [each.name for each in CUDA_EXERCISES])
def test_every_solution_passes_and_says_what_was_not_seen(name: str) -> None:
    verdict = checked(name, find(name).solution())
    assert verdict.has_passed, str(verdict)
    assert PLAYED in verdict.notes and (NO_NVCC in verdict.notes) == (shutil.which("nvcc") is None)


@pytest.mark.parametrize("name", [each.name for each in CUDA_EXERCISES])
def test_every_starter_fails(name: str) -> None:
    verdict = checked(name, find(name).starter())
    if name not in RIGHT_BUT_SLOW:
        assert not verdict.is_right
    elif shutil.which("nvcc"):
        assert [fault.kind for fault in verdict.faults] == ["goal"]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_named_at_its_line(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "__global__ void add_kernel(const float* x, const float* y, float* out, int n) {\n"
    source = f"{head}    int i = blockIdx.x * blockDim.x + threadIdx.x;\n    {mistake.body}\n}}{mistake.launch}"
    monkeypatch.setattr(checking, "has_nvcc", lambda: False)  # a CPU alone shows these
    verdict = checked("add.cu", source)
    found = [fault for fault in verdict.faults if fault.kind == mistake.kind and mistake.word in fault.text]
    assert found, str(verdict)
    assert found[0].line == mistake.line, str(verdict)
    assert verdict.cpu_s > 0 or mistake.kind == "scan"  # the compilers' time counts


def test_lists() -> None:
    """Every variant has its files, and no other folder has such."""
    from sublight.learn.record import EXERCISES_FOLDER

    folders = {path.parent.name for path in EXERCISES_FOLDER.glob("*/*/solution.cu")}
    assert folders == {each.function for each in CUDA_EXERCISES} and len(folders) == 10
    for each in CUDA_EXERCISES:
        assert re.search(rf"\bvoid {each.function}\(", each.starter()) and "TODO" in each.starter()
        assert "TODO" not in each.solution()
