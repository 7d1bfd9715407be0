"""What the device waited for: a backlog from before the recording, other streams, room in the queue, a start-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sublight.diagnose import fakes, replay
from sublight.diagnose.fakes import BIG, LATENCY_US, Machine
from sublight.diagnose.model import COMMUNICATION
from sublight.diagnose.replay_test import products
from sublight.diagnose.rules.host_sync import HOST_SYNC
from sublight.trace.costs.kernels import is_communication
from sublight.trace.record import NONE, Kind

STREAM = 2  # the lane of the first stream


def step_us(machine: Machine) -> float:
    return fakes.case(machine.trace()).step_s * 1e6


def behind(count: int, us: float, *, stream: int = 0) -> Machine:
    """A device that is still at work when the recording begins: kernels whose launches were not recorded."""
    machine = Machine()
    for n in range(count):
        machine.add(Kind.KERNEL, "gemm", STREAM + stream, n * us, (n + 1) * us)
    machine.free[stream] = count * us
    return machine


# ------------------------------------------------------------------------------------------------ a backlog


@pytest.mark.parametrize("backlog", [0, 1, 20])
def test_a_backlog_lengthens_no_step(backlog: int) -> None:
    machine = behind(backlog, 400.0)
    for _ in range(4):
        with machine.step():
            products(machine, 10, 50.0)
    assert step_us(machine) == pytest.approx(500, rel=0.01)


def test_a_backlog_of_another_stream_holds_up_the_first_events_alone() -> None:
    """The stream of collectives is behind; the second product waits for it, the products after it do not."""
    machine = behind(1, 3000.0, stream=1)
    for number in range(4):
        with machine.step():
            products(machine, 1, 50.0)
            machine.free[0] = machine.free[1] if number == 0 else machine.free[0]
            products(machine, 9, 50.0)
    assert step_us(machine) == pytest.approx(500, rel=0.01)


def test_a_sync_on_a_backlog_is_no_cost_of_the_steps() -> None:
    machine = behind(8, 400.0)
    for number in range(2):  # of three, the first would be left out as warm-up
        with machine.step():
            if number == 0:
                machine.sync()
            products(machine, 10, 50.0)
    model = fakes.case(machine.trace()).model
    assert model.cost_s.max() < 10e-6
    assert replay.run(model).step_s * 1e6 == pytest.approx(500, rel=0.01)


def test_kernels_without_a_launch_in_the_middle_are_work() -> None:
    machine = Machine()
    for _ in range(4):
        with machine.step():
            products(machine, 10, 50.0)
            end = machine.free[0]
            machine.add(Kind.KERNEL, "launched by a kernel", STREAM, end, end + 100.0)
            machine.free[0] = end + 100.0
    assert step_us(machine) == pytest.approx(600, rel=0.01)


def test_a_trace_that_records_few_launches_keeps_its_kernels() -> None:
    """Where most kernels have no launch, that is how the profiler writes them, and no backlog."""
    machine = behind(20, 100.0)
    with machine.step():
        machine.python(2000.0)
        products(machine, 2, 100.0)
    assert len(fakes.case(machine.trace()).model.event_row) == 22


# ------------------------------------------------------------------------------------------------ other streams


def talking(gap_us: float) -> Machine:
    """Products, a collective behind them, and the next step's products `gap_us` after the collective's end."""
    machine = Machine()
    for _ in range(4):
        with machine.step():
            products(machine, 5, 100.0, host=4.0)
            machine.launch("ncclDevKernel_AllReduce", 500.0, stream=1, after=0)
            machine.free[0] = machine.free[1] + gap_us
    return machine


@pytest.mark.parametrize("gap_us", [0.0, 4.0, 17.0, 40.0])
def test_a_wait_for_a_collective_is_seen_over_the_gap_behind_it(gap_us: float) -> None:
    model = fakes.case(talking(gap_us).trace()).model
    held = np.flatnonzero(model.after != NONE)
    after_talk = model.after[held][model.kind[model.after[held]] == COMMUNICATION]
    assert len(after_talk) == 3  # the first products of the second, third and fourth step
    assert model.delay_s[held].max() * 1e6 == pytest.approx(gap_us, abs=0.1)


def test_an_event_that_ended_long_before_held_nothing_back() -> None:
    """Held back for 60 µs, of which 40 after the other's end: something else was the reason."""
    machine = Machine()
    with machine.step():
        products(machine, 1, 50.0)
        machine.launch("elementwise", 70.0, stream=1)
        machine.free[0] = machine.free[1] + 40.0
        products(machine, 1, 50.0)
    model = fakes.case(machine.trace()).model
    assert (model.after == NONE).all()
    assert model.delay_s.max() * 1e6 > 40


@pytest.mark.parametrize(
    "name",
    [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*)",
        "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
        "mscclKernel_Sum_half_Simple",
        "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)",
        "void deep_ep::internode_ll::combine<3, 7168, 9>(void*)",
        "void deep_ep::intranode::cached_notify_combine<8>(void**)",
        "void vllm::cross_device_reduce_2stage<__half, 8>(vllm::RankData*)",
        "void sglang::cross_device_reduce_1stage<nv_bfloat16, 2>()",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<2, __half, 8>()",
        "void quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<__half>>()",
        "nvshmemi_transfer_rma_nbi", "void c10d::symmetric_memory::one_shot_all_reduce_kernel<float, 16, 8>()",
        "userbuffers_fp16_sum_inplace_gpu_rr_ag", "void tensorrt_llm::kernels::moe_a2a_dispatch()",
    ],
)  # fmt: skip
def test_kernels_that_communicate_are_known_by_their_names(name: str) -> None:
    assert is_communication(name)
    machine = Machine()
    for _ in range(2):
        with machine.step():
            products(machine, 5, 100.0)
            machine.launch(name, 500.0)
    case = fakes.case(machine.trace())
    assert case.split.parts["communication"] * 1e6 == pytest.approx(500, rel=0.02)


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>()", "splitKreduce_kernel<32, 16>",
        "void at::native::vectorized_gather_kernel<16, long>()", "indexSelectLargeIndex", "void cub::DeviceReduce()",
        "moe_align_block_size_kernel", "fused_moe_kernel", "paged_attention_v2_reduce_kernel",
        "void at::native::_scatter_gather_elementwise_kernel<128, 8>()", "CatArrayBatchedCopy",
    ],
)  # fmt: skip
def test_kernels_that_only_sound_like_it(name: str) -> None:
    assert not is_communication(name)


# ------------------------------------------------------------------------------------------------ slow calls


def with_a_slow_launch(us: float, every: int, *, busy: bool = False) -> Machine:
    machine = Machine()
    for number in range(4):
        with machine.step():
            products(machine, 1, us if busy else 10.0)
            if number % every == every - 1:
                with machine.range("hipLaunchKernel", Kind.RUNTIME, correlation=10_000 + number):
                    machine.now += us
                begin = max(machine.now, machine.free[0])
                machine.add(Kind.KERNEL, "norm", STREAM, begin, begin + 10.0, correlation=10_000 + number)
                machine.free[0] = begin + 10.0
            machine.op("aten::relu", BIG, us=100.0)
    return machine


def parts_us(machine: Machine) -> dict[str, float]:
    return {name: seconds * 1e6 for name, seconds in fakes.case(machine.trace()).split.parts.items()}


def test_a_kernels_first_launch_is_start_up() -> None:
    """One launch of 100 ms with the device idle, in one of four steps: its code was loaded."""
    parts = parts_us(with_a_slow_launch(100_000.0, 4))
    assert parts["start_up"] == pytest.approx(25_000, rel=0.01)
    assert parts["launch"] < 100 and parts["other"] < 1


def test_a_slow_call_in_every_step_is_the_steps_own() -> None:
    parts = parts_us(with_a_slow_launch(10_000.0, 1))
    assert parts["start_up"] == 0
    assert parts["launch"] == pytest.approx(10_000, rel=0.03)


def test_a_launch_that_takes_long_while_the_device_works_waits_for_room() -> None:
    case = fakes.case(with_a_slow_launch(10_000.0, 1, busy=True).trace())
    assert case.model.cost_s.max() < 100e-6
    assert case.step_s * 1e6 == pytest.approx(10_110, rel=0.01)


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (lambda m: m.call("cudaStreamCreateWithFlags", 50_000.0), "start_up"),
        (lambda m: m.call("cudaFree", 50_000.0), "start_up"),
        (lambda m: m.call("cudaMalloc", 500.0), "allocator"),  # what a step can do each time
    ],
)
def test_calls_that_bring_something_up(body: Callable[[Machine], Any], part: str) -> None:
    machine = Machine()
    with machine.step():
        products(machine, 3, 10.0)
        body(machine)
        products(machine, 3, 10.0)
    parts = parts_us(machine)
    assert parts[part] > 400 and parts[part] == max(parts.values())


def test_launches_that_all_wait_for_their_kernels() -> None:
    """CUDA_LAUNCH_BLOCKING=1: each call returns after its kernel's end, and the device waits for the next."""
    machine = Machine()
    for _ in range(4):
        with machine.step():
            for _ in range(20):
                machine.python(50.0)
                machine.launch("elementwise", 120.0, blocking=True)
    case = fakes.case(machine.trace())
    assert case.step_s * 1e6 == pytest.approx(20 * (50 + LATENCY_US + 120 + 1), rel=0.01)
    finding = fakes.findings(case, [HOST_SYNC])[0][0]
    assert finding.title == "All 20 launches a step wait for their kernels" and "CUDA_LAUNCH_BLOCKING" in finding.fix
    assert finding.saving_s * 1e6 == pytest.approx(20 * 55, rel=0.02)
