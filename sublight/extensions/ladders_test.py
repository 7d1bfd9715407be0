"""Every step of every ladder is right by the one rule: played on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from sublight import correct
from sublight.errors import BadInput
from sublight.extensions import LADDERS, build
from sublight.extensions.check import error_of
from sublight.extensions.ladder import Ladder, Rung
from sublight.extensions.played import OnCpu, PlayedFault

STEPS = [pytest.param(ladder, rung, id=f"{ladder.name}-{rung.name}") for ladder in LADDERS for rung in ladder.rungs]
BY_NAME = {ladder.name: ladder for ladder in LADDERS}


@pytest.fixture(autouse=True)
def _needs_a_compiler() -> None:
    try:
        build.host_compiler()
    except BadInput as error:
        pytest.skip(str(error))


PLAYED = [step for step in STEPS if not step.values[1].source]


@pytest.mark.parametrize(("ladder", "rung"), PLAYED)
def test_right_on_the_cpu(ladder: Ladder, rung: Rung) -> None:
    """Threads from the first to the last; for the largest shape from the last to the first, too."""
    for dtype in rung.dtypes:
        taken = []
        for shape in ladder.test_shapes:
            if error := error_of(ladder, rung, shape, dtype, "cpu"):
                assert error.ok, f"{shape} {dtype}: {error}"
                taken.append(shape)
        assert taken, "no shape of the test is taken"
        error = error_of(ladder, rung, taken[-1], dtype, "cpu", reversed=True)
        assert error and error.ok, f"{taken[-1]} {dtype} from the last thread to the first: {error}"


def sums_as_cublas(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Chains of 64 fused multiplications, added up. At 256 x 256 x 320 its squared errors add up to 3.84e-6 over the
    seeds 0 to 7, those of cuBLAS on an H200 to 3.83e-6; a float64 holds a product of floats exactly."""
    if a.dtype != torch.float32:
        return a @ b
    total = torch.zeros(a.shape[0], b.shape[1])
    for left, right in zip(a.double().split(64, 1), b.double().split(64, 0), strict=True):
        part = torch.zeros_like(total)
        for i in range(left.shape[1]):
            part = (part.double() + left[:, i, None] * right[None, i]).float()
        total = total + part
    return total


@pytest.mark.parametrize("name", ["naive", "tiled", "registers", "vectorised", "pipelined"])
def test_long_sums_are_as_exact_as_cublas(name: str) -> None:
    """PyTorch on a CPU has a larger error here than on a GPU: it lets pass what must not pass there."""
    matmul = BY_NAME["matmul"]
    rung = dataclasses.replace(matmul.rung(name), yardstick=sums_as_cublas)
    error = error_of(matmul, rung, {"m": 128, "n": 128, "k": 848}, "float32", "cpu")
    assert error and error.ok, str(error)


@pytest.mark.gpu
@pytest.mark.parametrize(("ladder", "rung"), STEPS)
def test_right_on_a_gpu(ladder: Ladder, rung: Rung) -> None:
    for dtype in rung.dtypes:
        for shape in ladder.test_shapes:
            if error := error_of(ladder, rung, shape, dtype, "cuda"):
                assert error.ok, f"{shape} {dtype}: {error}"


@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_rows_of_any_contents(name: str) -> None:
    """A row of -inf but one, large numbers, and rows that do not follow one another in memory."""
    ladder = BY_NAME[name]
    x, *parameters = ladder.inputs({"rows": 3, "cols": 72}, "float32", "cpu", 0)
    x = torch.cat([x, x], 1)[:, :72]  # gaps between rows
    x[1] += 1e4
    if name == "softmax":
        x[0] = -torch.inf
        x[0, 70] = 3.0
    for rung in ladder.rungs:
        (error,) = correct.forward_errors(ladder.call(rung), ladder.reference, (x, *parameters))
        assert error.ok, f"{rung.name}: {error}"


def test_what_a_step_does_not_take_is_refused() -> None:
    transpose, matmul = BY_NAME["transpose"], BY_NAME["matmul"]
    with pytest.raises(BadInput, match="takes float32, not float64"):
        transpose.call(transpose.rungs[0])(torch.zeros(4, 4, dtype=torch.float64))
    with pytest.raises(BadInput, match="4 divides"):
        transpose.call(transpose.rung("vectorised"))(torch.zeros(5, 4))
    with pytest.raises(BadInput, match="k that 64 divides"):
        matmul.call(matmul.rung("mma"))(torch.zeros(128, 32).half(), torch.zeros(32, 256).half())
    with pytest.raises(BadInput, match="a GPU of sm_90, which alone has"):
        matmul.call(matmul.rung("wgmma"))(torch.zeros(128, 64).half(), torch.zeros(64, 256).half())
    with pytest.raises(BadInput, match="no empty tensor"):
        transpose.call(transpose.rungs[0])(torch.zeros(0, 4))
    with pytest.raises(BadInput, match="unknown step of matmul 'mna'"):
        matmul.rung("mna")


WRONG = r"""
#include "block.cuh"
extern "C" __global__ void no_barrier(const float* x, float* y) {
    __shared__ float held[64];
    held[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = held[63 - threadIdx.x];
}
extern "C" __global__ void with_barrier(const float* x, float* y) {
    __shared__ float held[64];
    held[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = held[63 - threadIdx.x];
}
extern "C" __global__ void two_barriers(const float* x, float* y) {
    if (threadIdx.x < 40) __syncthreads();
    else __syncwarp();
    if (threadIdx.x == 0) __syncwarp();
}
extern "C" __global__ void never_waits(const float* x, float* y) {
    __shared__ __align__(16) float held[4];
    if (threadIdx.x == 0) copy_async_16(held, x), copy_async_commit();
}
extern "C" __global__ void waits_for_the_wrong_group(const float* x, float* y) {
    __shared__ __align__(16) float held[2][4];
    for (int i = 0; i < 2; ++i) copy_async_16(held[i], x + 4 * i), copy_async_commit();
    copy_async_wait<1>();
    y[threadIdx.x] = held[1][0];
    copy_async_wait<0>();
}
extern "C" __global__ void unaligned(const float* x, float* y) {
    __shared__ __align__(16) float held[8];
    copy_async_16(held + 1, x);
}
"""
WRONG_KERNELS = ("no_barrier", "with_barrier", "two_barriers", "never_waits", "waits_for_the_wrong_group", "unaligned")


def test_the_player_finds_wrong_kernels(tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes on a CPU must not be what a GPU would get wrong, as far as that can be seen."""
    monkeypatch.setenv("SUBLIGHT_CACHE", str(tmp_path))
    path = tmp_path / "wrong.cu"  # type: ignore[operator]
    path.write_text(WRONG)
    forward, backward = (OnCpu(str(path), WRONG_KERNELS, reversed=each) for each in (False, True))
    x = torch.arange(1.0, 65.0)

    def result(runner: OnCpu, kernel: str) -> torch.Tensor:
        y = torch.zeros(64)
        runner.launch(kernel, (1,), (64,), x, y)
        return y

    assert result(forward, "with_barrier").equal(x.flip(0)) and result(backward, "with_barrier").equal(x.flip(0))
    assert not result(forward, "no_barrier").equal(result(backward, "no_barrier"))
    assert not result(forward, "waits_for_the_wrong_group").eq(x[4]).all()
    for kernel, words in (
        ("two_barriers", "different barriers"),
        ("never_waits", "copy_async_wait"),
        ("unaligned", "no multiple of 16"),
    ):
        with pytest.raises(PlayedFault, match=words):
            result(forward, kernel)
        assert result(forward, "with_barrier").equal(x.flip(0))  # nothing is left of threads that were stuck
