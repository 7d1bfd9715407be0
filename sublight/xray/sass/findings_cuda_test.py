"""What is found in CUDA C++, compiled by nvcc where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from sublight.gpus import find
from sublight.xray import binary
from sublight.xray.record import Code, Resources
from sublight.xray.sass.findings import code_findings
from sublight.xray.sass.instruction import parse

GPUS = {"sm_90": "h200", "sm_120": "rtx5090"}
SOURCE = """\
__device__ __forceinline__ float twice(float v) {
    return v * v + v;
}
extern "C" __global__ void table(const int* which, float* y, int n) {
    float kept[16];
    for (int i = 0; i < 16; ++i) kept[i] = y[i * n];
    for (int i = 0; i < n; ++i) kept[which[i] & 15] += 1.0f;
    y[threadIdx.x] = kept[which[n] & 15];
}
extern "C" __global__ void bytes(const unsigned char* x, unsigned char* y, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        y[2 * i] = x[2 * i] + 1;
        y[2 * i + 1] = twice(x[2 * i + 1]);
    }
}
extern "C" __global__ void clean(const float4* x, float4* y, const unsigned char* flags, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        if (flags[0]) y[i] = x[i];
}
"""


@pytest.fixture(scope="module", params=list(GPUS))
def cuda(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Code]:
    nvcc = shutil.which("nvcc")
    if not nvcc:
        pytest.skip("no nvcc")
    file = tmp_path_factory.mktemp("cuda") / "kernels.cu"
    file.write_text(SOURCE, encoding="utf-8")
    cubin = file.with_suffix(".cubin")
    command = [nvcc, f"-arch={request.param}", "-lineinfo", "-cubin", "-o", str(cubin), str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "Unsupported gpu architecture" in done.stderr:
        pytest.skip(f"this nvcc does not know {request.param}")
    assert done.returncode == 0, done.stderr
    listings, usage = binary.disassemble(cubin.read_bytes()), binary.usage(cubin.read_bytes())
    return {
        name: Code(name=name, symbol=name, gpu=find(GPUS[request.param]), resources=resources(usage[name]), sass=sass)
        for name, sass in listings.items()
    }


def resources(used: dict[str, int]) -> Resources:
    return Resources(registers=used["REG"], spill_bytes=used["STACK"], stack_bytes=used["STACK"])


def test_an_array_that_is_indexed_at_run_time(cuda: dict[str, Code]) -> None:
    (finding,) = [finding for finding in code_findings(cuda["table"]) if not finding.is_information]
    assert (finding.id, finding.place and finding.place.line) == ("local-array", 7)
    assert "64 bytes" in finding.detail


def test_bytes_one_by_one(cuda: dict[str, Code]) -> None:
    findings = [finding for finding in code_findings(cuda["bytes"]) if not finding.is_information]
    assert {(finding.id, finding.place.line) for finding in findings if finding.place} == {
        ("narrow-load", 12),
        ("narrow-store", 12),
        ("narrow-load", 13),
        ("narrow-store", 13),
    }
    inlined = [each for each in parse(cuda["bytes"].sass) if each.opcode == "FFMA"]
    assert inlined and all([place.line for place in each.places] == [2, 13] for each in inlined)


def test_a_flag_that_all_lanes_read_is_no_narrow_load(cuda: dict[str, Code]) -> None:
    made = cuda["clean"]
    assert re.search(r"LDG\.E\.U8", made.sass)
    assert [finding for finding in code_findings(made) if not finding.is_information] == []
