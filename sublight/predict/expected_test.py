"""What must hold whatever the shape: floor below time, more of anything is never slower, tables meet their nodes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublight import cost, gpus
from sublight.predict import analytic, census, config, estimate, expected, links, machine, table
from sublight.predict.backward import GRADIENTS
from sublight.predict.machine import Machine
from sublight.predict.operation import Operation, product
from sublight.predict.step import Parallel, Precision, Step

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


@pytest.mark.parametrize(
    ("head_dim", "tokens", "causal", "forward", "backward"),
    [(128, 4096, 0, 667, 567), (128, 4096, 1, 575, 486), (128, 16384, 0, 618, 548), (128, 16384, 1, 578, 526),
     (64, 4096, 0, 476, 450), (64, 4096, 1, 414, 372)],
)  # fmt: skip
def test_attention_without_rows_of_its_own_is_near_what_cudnn_reached(
    head_dim: int, tokens: int, causal: int, forward: int, backward: int
) -> None:
    """TFLOP/s on an H200, 4 x 16 heads (docs/attention.md), to which nothing but the share of the backward pass was
    fitted."""
    shape = {"batch": 4, "q_len": tokens, "kv_len": tokens, "heads": 16, "kv_heads": 16, "head_dim": head_dim}
    for direction, rate, passes in (("fwd", forward, 1.0), ("bwd", backward, 2.5)):
        spent = cost.find("attention")(shape | {"causal": causal}, "bfloat16", direction)  # type: ignore[arg-type]
        op = Operation(name="", op="attention", kind="attention", shape=shape | {"causal": causal}, dtype="bfloat16",
                       direction=direction, count=1, cost=spent)  # type: ignore[arg-type]  # fmt: skip
        found = expected.timed(op, machine.find("h200"))
        flops = passes * 4 * 4 * 16 * tokens**2 * head_dim / (2 if causal else 1)
        assert found.expected_s == pytest.approx(flops / (rate * 1e12), rel=0.13)
        assert found.how == ("measured" if causal and direction == "fwd" else "analytic")
        if found.how == "analytic":  # it says no less than what it would on a GPU without rows
            assert found.error >= table.analytic_error("prefill attention")


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
        step = Step(mode=mode, batch=1 if gains else 2, context=2048)  # type: ignore[arg-type]
        plain, more = (estimate.predict(model, gpu, step) for gpu in (here, larger))
        norms = [[op.timed for op in found.ops if op.operation.op == "add_rms_norm"] for found in (plain, more)]
        assert (norms[1][0].expected_s < 0.9 * norms[0][0].expected_s) == gains
        assert (more.expected_s < 0.999 * plain.expected_s) == gains


def test_parameters_of_an_older_calibration_still_count() -> None:
    """A user's file may lack what the model learned since: the ramp, rows that no number divides, sorts."""
    rates, rows = expected.rates_of(machine.find("h200")), analytic.Rows(length=4097, count=500, sorted=512)
    old = {"launch_s": 2e-6, "cold_s": 5e-7, "stream": 0.9, "sm_share": 2.0, "blend": 3.0, "odd": 0.5}
    plain_s = analytic.stream_s(1 << 24, 1, rates, old, rows)
    same = {**old, "odd_most": 0.5, "ramp_s": 0.0, "ramp": 1.0, "sort_s": 0.0}
    assert plain_s == pytest.approx(analytic.stream_s(1 << 24, 1, rates, same, rows))
    for name, value in (("odd_most", 0.3), ("ramp_s", 1e-6), ("sort_s", 1e-6)):
        assert analytic.stream_s(1 << 24, 1, rates, {**same, name: value}, rows) > 1.01 * plain_s


def test_a_draw_waits_for_its_sort() -> None:
    """Of 151,936 logits, whose groups do not fill vectors, longer than of 256,000, as it was measured."""
    here = machine.find("h200")
    times = {}
    for rows, vocab in ((11, 151_936), (11, 256_000), (200, 151_936)):
        spent = cost.find("sample")({"rows": rows, "vocab": vocab}, "bfloat16", "fwd")
        op = Operation(name="", op="sample", kind="stream", shape={"rows": rows, "vocab": vocab}, dtype="bfloat16",
                       count=1, cost=spent)  # fmt: skip
        times[rows, vocab] = expected.timed(op, here).expected_s
    assert times[11, 256_000] < times[11, 151_936] < times[200, 151_936]
    assert times[11, 151_936] == pytest.approx(28.4e-6, rel=0.15)


def test_a_longer_prompt_and_a_larger_batch_take_longer() -> None:
    model, here = config.load("llama-3-8b"), machine.find("h100")
    times = [
        estimate.predict(model, here, Step(mode="prefill", batch=batch, context=context)).expected_s
        for batch, context in ((1, 512), (1, 2048), (4, 2048), (4, 8192))
    ]
    assert times == sorted(times)


def test_few_tokens_of_a_large_table_train_no_slower_than_many() -> None:
    model, here = config.load("gemma-2-9b"), machine.find("h200")  # 256,000 rows, all of which have a gradient
    times = [
        estimate.predict(model, here, Step(mode="train", batch=1, context=context)).expected_s
        for context in (1, 2, 16, 128, 1024)
    ]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("gpu", "how"),
    [("h100", "measured"), ("h200", "measured"), ("gh200", "carried over"), ("a100", "analytic"), ("b200", "analytic")],
)
def test_each_time_says_how_it_is_known(gpu: str, how: str) -> None:
    found = estimate.predict(config.load("llama-3-8b"), machine.find(gpu), Step(mode="decode", batch=2, context=512))
    products = {op.timed.how for op in found.ops if op.operation.kind == "product"}
    assert products == {how}


def test_a_weight_that_is_read_ahead_was_timed_on_one_gpu() -> None:
    """What a product of one row takes then is the H200's: of its kin it is carried over, with the larger error."""
    step = Step(mode="decode", batch=1, context=512)
    ways = {
        gpu: {op.timed.how for op in estimate.predict(config.load("llama-3-8b"), machine.find(gpu), step).ops
              if op.operation.chained}
        for gpu in ("h200", "h100", "gh200", "b200")
    }  # fmt: skip
    assert ways == {"h200": {"measured"}, "h100": {"carried over"}, "gh200": {"carried over"}, "b200": {"analytic"}}


def test_a_changed_gpu_is_not_measured() -> None:
    found = estimate.predict(
        config.load("llama-3-8b"),
        machine.change(machine.find("h100"), {"flops": 2.0}),
        Step(mode="decode", batch=1, context=512),
    )
    assert "measured" not in found.how


def test_more_error_where_less_is_known() -> None:
    step, model = Step(mode="prefill", batch=1, context=2048), config.load("llama-3-8b")
    measured, near, far = (estimate.predict(model, machine.find(gpu), step).error for gpu in ("h200", "gh200", "l4"))
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
    step = Step(mode="train", batch=32, context=4096, parallel=Parallel(pipeline=4))
    part, parts, rounds = estimate.micro(step)
    assert (part.batch, parts, rounds) == (2, 16, 19)
    assert estimate.micro(replace(step, mode="decode"))[1:] == (4, 4)
    model = config.load("llama-3-8b")
    ops = estimate.predict(model, machine.find("h100"), step).ops
    assert next(op.runs for op in ops if op.operation.name == "optimizer") == 1
    assert next(op.runs for op in ops if op.operation.name == "MLP up") == 8 * 19
    assert next(op.runs for op in ops if op.operation.name == "head") == 16  # of one stage alone
    alone, four = (
        estimate.predict(model, machine.find("h100"), each) for each in (replace(step, parallel=Parallel()), step)
    )
    assert 4 * four.flops == alone.flops  # four stages do what one GPU does, and the bubble does nothing


@pytest.mark.parametrize(
    ("name", "gpu", "context"),
    [("qwen3-0.6b", "h200", 100), ("llama-3.2-1b", "mi300x", 128), ("bert-base", "a100", 512)],
)
def test_few_tokens_go_through_a_pipeline_in_fewer_parts(name: str, gpu: str, context: int) -> None:
    """Eight parts of one sequence read all weights eight times: nine sequences were once faster than eight."""
    model, here = config.load(name), machine.find(gpu)
    step = Step(mode="train", batch=8, context=context, parallel=Parallel(pipeline=2))
    times = [estimate.predict(model, here, replace(step, batch=batch)).expected_s for batch in (8, 9, 16, 17)]
    assert times == sorted(times)


@pytest.mark.parametrize(("mode", "batch"), [("train", 9), ("prefill", 5), ("decode", 3)])
def test_parts_of_a_pipeline_are_no_more_than_its_batch_fills(mode: str, batch: int) -> None:
    step = Step(mode=mode, batch=batch, context=64, parallel=Parallel(pipeline=2))  # type: ignore[arg-type]
    part, parts, _ = estimate.micro(step)
    assert 0 <= part.batch * parts - batch < part.batch


def test_one_token_through_a_pipeline_meets_the_head_once() -> None:
    model, here = config.load("llama-3.2-1b"), machine.find("h100")
    step = Step(mode="decode", batch=1, context=64, eager=True)
    one, four = (estimate.predict(model, here, replace(step, parallel=Parallel(pipeline=ways))) for ways in (1, 4))
    links = sum(op.expected_s for op in four.ops if op.operation.kind == "link")
    assert four.expected_s - links == pytest.approx(one.expected_s, rel=1e-6)


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


@pytest.mark.parametrize(("knob", "factor"), [("links", 50.0), ("flops", 3.0), ("bandwidth", 1.02), ("l2", 2.0)])
def test_the_floor_of_a_step_over_gpus_falls_with_more_of_anything(knob: str, factor: float) -> None:
    """What is hidden of a floor is hidden under floors, not under times: these fall with more FLOPs, too."""
    for name, batch, context, parallel in (
        ("mixtral-8x7b", 2, 128, Parallel(pipeline=2, data=2)),
        ("qwen2.5-7b", 3, 1, Parallel(tensor=4, data=2)),
        ("qwen3-1.7b", 2, 128, Parallel()),
    ):
        model, step = config.load(name), Step(mode="train", batch=batch, context=context, parallel=parallel)
        for gpu in ("b200", "h100"):
            here = machine.find(gpu)
            plain, more = (estimate.predict(model, each, step) for each in (here, machine.change(here, {knob: factor})))
            assert more.floor_s <= plain.floor_s * (1 + 1e-9) and more.expected_s <= plain.expected_s * (1 + 1e-9)


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


def ways_of(gpu: str, kind: str, precision: Precision, batch: int = 8) -> set[str]:
    """Of the layers' ops of this kind: how they are known; the head stays in 16 bits."""
    step = Step(mode="decode", batch=batch, context=64, precision=precision)
    ops = estimate.predict(config.load("llama-3-8b"), machine.find(gpu), step).ops
    return {op.timed.how for op in ops if op.operation.kind == kind and op.operation.name != "head"}


def test_weights_and_caches_that_no_table_has_are_not_called_measured() -> None:
    fp8 = "float8_e4m3fn"
    assert ways_of("h200", "attention", Precision(cache=fp8)) == {"analytic"}
    for few in (Precision(weights="int8"), Precision(weights=fp8), Precision(weights="int8", products="int8")):
        assert ways_of("h200", "product", few) == {"analytic"}
    assert ways_of("h200", "product", Precision(weights="int4"), batch=129) == {"analytic"}
    assert ways_of("a100", "product", Precision(weights="int4")) == {"analytic"}
    for kind in ("product", "attention"):
        assert ways_of("h200", kind, Precision()) == {"measured"}


def test_fewer_bits_have_tables_of_their_own_and_are_less_well_known() -> None:
    fp8 = Precision(products="float8_e4m3fn", weights="float8_e4m3fn")
    assert ways_of("h200", "product", Precision(weights="int4")) == {"measured"}
    assert ways_of("h100", "product", Precision(weights="int4")) == {"carried over"}
    assert ways_of("h100", "product", fp8) == {"measured"} and ways_of("h200", "product", fp8) == {"carried over"}
    errors = [
        estimate.predict(config.load("llama-3-8b"), machine.find("a100"), Step(mode="decode", batch=8, context=64,
                         precision=each)).error
        for each in (Precision(), Precision(weights="int4"))
    ]  # fmt: skip
    assert errors[1] > 1.3 * errors[0]


def test_a_backward_pass_over_four_bits_has_no_table() -> None:
    step = Step(mode="train", batch=1, context=64, lora=16, precision=Precision(weights="int4"))
    ops = estimate.predict(config.load("llama-3-8b"), machine.find("h200"), step).ops
    ways = {op.operation.direction: op.timed.how for op in ops if op.operation.name == "MLP up"}
    assert ways == {"fwd": "measured", "bwd": "analytic"}


@pytest.mark.parametrize("rows", [1, 8, 9, 64, 128])
def test_weights_of_four_bits_take_what_was_measured(rows: int) -> None:
    """14336 x 4096 on an H200, µs, by the kernels that take so many rows (benchmarks/products_h200.json)."""
    measured = {1: 13.2, 8: 14.5, 9: 20.9, 64: 23.1, 128: 32.7}  # 8 and 9 as 4 and 16
    step = Step(mode="decode", batch=rows, context=64, precision=Precision(weights="int4"))
    found = expected.timed(product(step, "", rows, 14336, 4096, 1), machine.find("h200"))
    assert found.how == "measured" and found.expected_s == pytest.approx(1e-6 * measured[rows], rel=found.error)
