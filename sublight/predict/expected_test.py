"""What must hold whatever the shape: floor below time, more of anything is never slower, tables meet their nodes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublight import gpus
from sublight.predict import analytic, census, config, estimate, expected, links, machine, table
from sublight.predict.backward import GRADIENTS
from sublight.predict.machine import Machine
from sublight.predict.step import Parallel, Step

NAMES = ("llama-3-8b", "gpt2", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b")
KNOWN = ("h100", "h200", "a100", "b200", "l40s", "mi300x")
STEPS = st.builds(
    Step,
    mode=st.sampled_from(("prefill", "decode", "train")),
    batch=st.integers(1, 300),
    context=st.integers(1, 1000),
)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from(KNOWN), STEPS)
def test_floor_below_time_and_sums_agree(name: str, gpu: str, step: Step) -> None:
    found = estimate.predict(config.load(name), machine.find(gpu), step)
    assert all(0 < op.timed.floor_s <= op.timed.expected_s < math.inf for op in found.ops)
    assert all(0 < op.timed.efficiency <= 1 and 0 < op.timed.error < 1 for op in found.ops)
    assert found.expected_s == pytest.approx(sum(op.runs * op.timed.expected_s for op in found.ops))
    assert sum(found.how.values()) == pytest.approx(1) and sum(found.bounds.values()) == pytest.approx(1)
    assert 0 < found.mfu < 1 and found.floor_s <= found.expected_s


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(KNOWN),
    STEPS,
    st.sampled_from(("bandwidth", "flops", "l2", "memory", "power", "links")),
    st.floats(1.0, 8.0),
)
def test_more_of_anything_is_never_slower(name: str, gpu: str, step: Step, knob: str, factor: float) -> None:
    here = machine.find(gpu)
    model = config.load(name)
    plain = estimate.predict(model, here, step)
    more = estimate.predict(model, machine.change(here, {knob: factor}), step)
    assert more.expected_s <= plain.expected_s * (1 + 1e-9) and more.floor_s <= plain.floor_s * (1 + 1e-9)
    assert more.largest_batch >= plain.largest_batch


def test_the_bottleneck_moves_from_weights_to_the_cache() -> None:
    model, here = config.load("llama-3-8b"), machine.find("h200")
    found = [
        estimate.predict(model, here, Step(mode="decode", batch=batch, context=context)).bottleneck
        for batch, context in ((1, 1024), (64, 4096))
    ]
    assert found == ["weights", "cache"]
    assert estimate.predict(model, here, Step(mode="prefill", batch=1, context=4096)).bottleneck == "compute"


def test_twice_the_bandwidth_speeds_up_what_memory_bounds() -> None:
    here, model = machine.find("h100"), config.load("llama-3-8b")
    step = Step(mode="decode", batch=1, context=4096)
    plain, doubled = (
        estimate.predict(model, gpu, step).expected_s for gpu in (here, machine.change(here, {"bandwidth": 2.0}))
    )
    assert 1.4 < plain / doubled < 2.0


def test_a_larger_l2_keeps_activations_and_not_weights() -> None:
    """Four times 2048 x 4096 numbers are 64 MiB: most of them stay in an L2 of 120 MB, none in one of 60."""
    here, model = machine.find("h200"), config.load("llama-3-8b")
    larger = machine.change(here, {"l2": 2.0})
    for mode, gains in (("prefill", True), ("decode", False)):
        step = Step(mode=mode, batch=1, context=2048)  # type: ignore[arg-type]
        plain, more = (estimate.predict(model, gpu, step) for gpu in (here, larger))
        norms = [[op.timed for op in found.ops if op.operation.op == "add_rms_norm"] for found in (plain, more)]
        assert (norms[1][0].expected_s < 0.9 * norms[0][0].expected_s) == gains
        assert (more.expected_s < 0.999 * plain.expected_s) == gains


def test_a_longer_prompt_and_a_larger_batch_take_longer() -> None:
    model, here = config.load("llama-3-8b"), machine.find("h100")
    times = [
        estimate.predict(model, here, Step(mode="prefill", batch=batch, context=context)).expected_s
        for batch, context in ((1, 512), (1, 2048), (4, 2048), (4, 8192))
    ]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("gpu", "how"),
    [("h100", "measured"), ("h200", "measured"), ("gh200", "carried over"), ("a100", "analytic"), ("b200", "analytic")],
)
def test_each_time_says_how_it_is_known(gpu: str, how: str) -> None:
    found = estimate.predict(config.load("llama-3-8b"), machine.find(gpu), Step(mode="decode", batch=1, context=512))
    products = {op.timed.how for op in found.ops if op.operation.kind == "product"}
    assert products == {how}


def test_a_changed_gpu_is_not_measured() -> None:
    found = estimate.predict(
        config.load("llama-3-8b"),
        machine.change(machine.find("h100"), {"flops": 2.0}),
        Step(mode="decode", batch=1, context=512),
    )
    assert "measured" not in found.how


def test_more_error_where_less_is_known() -> None:
    step, model = Step(mode="prefill", batch=1, context=2048), config.load("llama-3-8b")
    measured, near, far = (estimate.predict(model, machine.find(gpu), step).error for gpu in ("h200", "gh200", "b200"))
    assert measured < near <= far + 0.05


@given(st.lists(st.floats(-1, 1), min_size=12, max_size=12), st.integers(0, 2), st.integers(0, 3))
def test_interpolation_meets_its_nodes_and_stays_between(values: list[float], row: int, column: int) -> None:
    axes = ((0.0, 2.0, 4.0), (5.0, 6.0, 8.0, 9.0))
    assert table.interpolate(axes, values, [axes[0][row], axes[1][column]]) == pytest.approx(values[4 * row + column])
    inside = table.interpolate(axes, values, [1.3, 7.1])
    assert min(values) - 1e-9 <= inside <= max(values) + 1e-9
    far = table.interpolate(axes, values, [99.0, -99.0])
    assert far == pytest.approx(values[8])


def test_wave_quantisation_shows() -> None:
    """A few tiles more than a wave take another wave: time steps up where the SMs run out, and is flat after that."""
    fitted, rates = table.parameters("product"), expected.rates_of(machine.find("h100"), "bfloat16")
    whole, more, much = (
        analytic.product_s(256, 128 * tiles, 8192, 1, 0, rates, fitted) - fitted["launch_s"]
        for tiles in (132, 135, 160)
    )
    assert more > 1.1 * whole and much < 1.15 * more


def test_no_time_is_below_the_floor_even_if_a_table_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table.Table, "correction", lambda self, sizes: 1e-6)
    found = estimate.predict(config.load("llama-3-8b"), machine.find("h100"), Step(mode="decode", batch=1, context=512))
    assert found.expected_s == pytest.approx(found.floor_s, rel=0.2)


def test_links() -> None:
    sizes = (1 << 10, 1 << 20, 1 << 30)
    times = [links.collective_s("all_reduce", size, 8, 450e9) for size in sizes]
    assert times == sorted(times) and times[2] == pytest.approx(2 * 7 / 8 * (1 << 30) / (0.8 * 450e9), rel=0.1)
    assert links.collective_s("all_gather", 1 << 30, 8, 450e9) < times[2]
    assert links.collective_s("all_reduce", 1 << 30, 8, 900e9) < times[2]


def test_tensor_parallel_cuts_time_but_not_to_the_half() -> None:
    model, here = config.load("llama-3-70b"), machine.find("h200")
    step = Step(mode="decode", batch=8, context=4096)
    one, two = (
        estimate.predict(model, here, replace(step, parallel=Parallel(tensor=ways))).expected_s for ways in (1, 2)
    )
    assert 1.2 < one / two < 2.0


def test_a_pipeline_fills_and_drains() -> None:
    step = Step(mode="train", batch=32, context=128, parallel=Parallel(pipeline=4))
    part, parts, rounds = estimate.micro(step)
    assert (part.batch, parts, rounds) == (2, 16, 19)
    assert estimate.micro(replace(step, mode="decode"))[1:] == (4, 4)
    model = config.load("llama-3-8b")
    ops = estimate.predict(model, machine.find("h100"), step).ops
    assert next(op.runs for op in ops if op.operation.name == "optimizer") == 1
    assert next(op.runs for op in ops if op.operation.name == "MLP up") == 8 * 19
    alone = estimate.predict(model, machine.find("h100"), replace(step, parallel=Parallel())).ops
    done = [
        sum(op.useful * op.operation.cost.total_flops for op in found if op.operation.name == "MLP up")
        for found in (ops, alone)
    ]
    assert 4 * done[0] == done[1]  # four stages do what one GPU does, and the bubble does nothing


def test_gradients_travel_while_the_backward_pass_runs_and_nothing_else_does() -> None:
    model, here = config.load("llama-3-8b"), replace(machine.find("h100"), network_bytes_per_s=5e10)
    step = Step(mode="train", batch=16, context=4096, checkpointing=True, parallel=Parallel(tensor=2, data=8))
    found, apart = (estimate.predict(model, here, replace(step, overlap=overlap)) for overlap in (True, False))
    gradients = [next(op for op in each.ops if op.operation.name == GRADIENTS) for each in (found, apart)]
    assert apart.hidden_s == 0 < found.hidden_s == gradients[0].hidden_s
    assert found.expected_s == pytest.approx(apart.expected_s - found.hidden_s)
    assert gradients[0].expected_s >= gradients[1].expected_s / model.layers and gradients[0].floor_s >= 0
    backward = [op for op in apart.ops if op.operation.direction == "bwd" or op.operation.name.endswith("(again)")]
    assert found.hidden_s == pytest.approx(sum(op.expected_s for op in backward if op.operation.kind != "link"))
    fast = replace(here, network_bytes_per_s=1e12)  # all but one layer's are hidden
    exposed = next(op for op in estimate.predict(model, fast, step).ops if op.operation.name == GRADIENTS)
    assert exposed.expected_s == pytest.approx((exposed.expected_s + exposed.hidden_s) / model.layers)


def test_energy_and_cost() -> None:
    found = estimate.predict(
        config.load("llama-3-8b"),
        machine.find("h100"),
        Step(mode="decode", batch=8, context=512),
        price_per_hour=3.6,
    )
    assert found.joules_per_token == pytest.approx(700 * found.expected_s / 8)
    assert found.price_per_million == pytest.approx(1000 * found.expected_s / 8)


def test_every_gpu_of_the_table_with_half_precision_products_can_be_asked() -> None:
    model, step = config.load("llama-3.2-1b"), Step(mode="decode", batch=1, context=128)
    for gpu in gpus.all_gpus():
        if "bf16" in gpu.peak_flops:
            here: Machine = machine.of_gpu(gpu)
            assert estimate.predict(model, here, step).expected_s > 0


def test_census_and_tables_speak_of_the_same_ops() -> None:
    """The measured tables of memory-bound ops are found for the ops of a step."""
    ops = census.census(config.load("llama-3-8b"), Step(mode="train", batch=1, context=512))
    streams = {f"stream {op.op} {op.direction}" for op in ops if op.kind == "stream"}
    known = {each.kind for each in table.tables() if each.gpu == "h200"}
    assert len(streams & known) >= 6
