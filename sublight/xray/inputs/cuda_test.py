"""CUDA C++ by nvcc, which is the user's own: skipped where there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")

from sublight.errors import BadInput
from sublight.gpus import find
from sublight.xray.inputs.load import load, sides_of
from sublight.xray.ptx.accesses import accesses, follow_blocks

SOURCE = """
extern "C" __global__ void __launch_bounds__(192) copy(const float4* x, float4* y) {
  __shared__ float4 tile[192];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = tile[191 - threadIdx.x];
}
template <typename T> __global__ void scale(T* x, T by) { x[threadIdx.x] *= by; }
template __global__ void scale<float>(float*, float);
__global__ void indexed(float* x, const int* k, int n) {
  float a[32], sum = 0;
  for (int i = 0; i < 32; i++) a[i] = x[i * n];
  for (int i = 0; i < n; i++) a[k[i] & 31] += x[i];
  for (int i = 0; i < 32; i++) sum += a[i] * i;
  x[threadIdx.x] = sum;
}
"""
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@needs_nvcc
def test_every_kernel_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_text(SOURCE)
    codes = {code.name: code for code in load(str(file), [find("h100")], shared_bytes=64)}
    assert set(codes) == {"copy", "scale<float>", "indexed"}
    copy, scale, indexed = codes["copy"], codes["scale<float>"], codes["indexed"]
    assert (copy.resources.threads, copy.resources.static_shared_bytes, copy.resources.barriers) == (192, 16 * 192, 1)
    assert copy.resources.dynamic_shared_bytes == 64, "and none that the driver reserves"
    assert scale.resources.threads is None and scale.symbol == "_Z5scaleIfEvPT_S0_"
    assert (indexed.resources.spill_bytes, indexed.resources.stack_bytes) == (0, 128)
    assert copy.file == str(file) and 'k.cu", line 4' in copy.sass and ".loc" in copy.ptx
    assert ".entry _Z5scale" not in copy.ptx and "LDG.E.128" in copy.sass
    assert indexed.signature == {"x": "float*", "k": "int*", "n": "int"}, "--arg n=4096 finds it"
    assert scale.signature == {"x": "T*", "by": ""} and copy.options == {}


@needs_nvcc
def test_a_block_has_sides(tmp_path: Path) -> None:
    file = tmp_path / "k.cu"
    file.write_text(
        "__global__ void turned(const float* x, float* y) {\n"
        "  __shared__ float tile[32][32];\n"
        "  tile[threadIdx.y][threadIdx.x] = x[threadIdx.y * 32 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "  y[threadIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][threadIdx.y];\n"
        "}\n"
    )
    (code,) = load(str(file), [find("h100")], threads="32x8")
    assert (code.resources.threads, code.options["block"]) == (256, (32, 8))
    seen = {(one.place.line, one.kind): one for one in accesses(code) if one.place and one.space == "shared"}
    assert (seen[3, "store"].bank_conflict, seen[5, "load"].bank_conflict) == (1, 32)
    (flat,) = load(str(file), [find("h100")], threads=256)
    assert "--threads 32x8" in follow_blocks(flat).problem, "which lane has which threadIdx.y is not known"


@pytest.mark.parametrize("threads", ["32x64", "0", "32x8x1x1", "many", 2048])
def test_no_such_block(threads: str | int) -> None:
    with pytest.raises(BadInput, match="--threads"):
        sides_of(threads)


@needs_nvcc
@pytest.mark.parametrize(
    ("source", "kernel", "words"),
    [
        ("__global__ void k(int* x) {\n  x[0] = y;\n}", "", 'k.cu:2: nvcc: identifier "y" is undefined'),
        ('#include "gone.h"\n', "", "k.cu:1: nvcc: gone.h: No such file or directory"),
        ("int main() { return 0; }", "", "has no kernel: a template needs an instance"),
        ("__global__ void k(int* x) { x[0] = 1; }", "other", "has no kernel 'other': it has k"),
        ("__global__ void k(int* x) { asm(\"bogus %0;\" :: \"r\"(x[0])); }", "", "bogus"),
    ],
)  # fmt: skip
def test_what_nvcc_says_is_one_line(tmp_path: Path, source: str, kernel: str, words: str) -> None:
    file = tmp_path / "k.cu"
    file.write_text(source)
    with pytest.raises(BadInput) as caught:
        load(f"{file}:{kernel}" if kernel else str(file), [find("a100")])
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_without_nvcc_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "k.cu").write_text(SOURCE)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BadInput, match=r"k\.cu needs nvcc, which is not on the PATH: install the CUDA toolkit"):
        load(str(tmp_path / "k.cu"), [find("h100")])


def test_a_gpu_that_nothing_compiles_for(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text(SOURCE)
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    with pytest.raises(BadInput, match="nothing compiles for p4"):
        load(str(tmp_path / "k.cu"), [find("p4")])
