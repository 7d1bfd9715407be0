"""What carries over from the GPU that the parameters were fitted to: cycles, tensor cores, and what they wait for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sublight.predict import analytic, expected, machine, table
from sublight.predict.analytic import Heads, Rates

H100 = expected.rates_of(machine.find("h100"), "bfloat16")
H200 = expected.rates_of(machine.find("h200"))
SMS = H200.sms
PROMPT = Heads(batch=64, queries=4096, keys=4096, heads=32, kv_heads=8, head_dim=128)


def prefill_s(shape: Heads, rates: Rates, **changed: float) -> float:
    return analytic.prefill_s(shape, 0, rates, table.parameters("prefill attention") | changed)


def test_what_a_kernel_waits_for_is_cycles() -> None:
    slow = replace(H100, pace=2.0)
    tiny = Heads(batch=1, queries=1, keys=1, heads=1, kv_heads=1, head_dim=64)
    for here in (
        lambda rates: analytic.product_s(1, 32, 32, 1, 0, rates, table.parameters("product")),
        lambda rates: analytic.decode_s(tiny, 0, rates, table.parameters("decode attention")),
        lambda rates: analytic.stream_s(64, 1, rates, table.parameters("stream"), analytic.Rows()),
    ):
        assert here(slow) == pytest.approx(2 * here(H100), rel=0.05)
    large = (8192, 8192, 8192, 1, 0)
    assert analytic.product_s(*large, slow, table.parameters("product")) < 1.1 * analytic.product_s(
        *large, H100, table.parameters("product")
    )


def test_a_thin_product_takes_as_long_along_k_as_the_least_tile_of_that_gpu() -> None:
    """What more of k adds to 16 x 16 results is the time of 64 x 64 at the SM's rate."""
    fitted = table.parameters("product") | {"stream": 1e9, "sm_share": 1e9, "split": 1e9}
    for rates in (H100, replace(H100, flops_per_s=H100.flops_per_s / 3)):
        short, long = (analytic.product_s(16, 16, k, 1, 0, rates, fitted) for k in (128, 192))
        along_s = 2 * fitted["least"] / (rates.flops_per_s / rates.sms)
        assert long - short == pytest.approx(64 * along_s, rel=1e-6)


def test_a_softmax_waits_where_tensor_cores_do_not_work_beside_the_rest() -> None:
    ends = {"prologue_s": 0.0, "launch_s": 0.0, "cold_s": 0.0}
    apart = prefill_s(PROMPT, replace(H100, overlaps=False), **ends)
    together, products = prefill_s(PROMPT, H100, **ends), prefill_s(PROMPT, H100, **ends, score_s=1e-30)
    scores = prefill_s(PROMPT, replace(H100, flops_per_s=1e30), **ends)
    assert max(products, scores) < together < apart == pytest.approx(products + scores)
    twice = prefill_s(PROMPT, replace(H100, flops_per_s=2 * H100.flops_per_s), **ends)
    assert together / twice < 1.8  # faster tensor cores alone leave the softmax as it is
    both = replace(H100, flops_per_s=2 * H100.flops_per_s, vectors=2.0)
    assert together / prefill_s(PROMPT, both, **ends) == pytest.approx(2.0)


def test_heads_of_a_group_share_the_blocks_of_short_prompts_where_kernels_pack_them() -> None:
    short = replace(PROMPT, queries=16, keys=16, batch=1024)
    assert prefill_s(short, H100, packs=0.0) > 3 * prefill_s(short, H100)
    assert prefill_s(short, replace(H100, overlaps=False)) == prefill_s(short, replace(H100, overlaps=False), packs=0.0)
    alone = replace(short, kv_heads=32)
    assert prefill_s(alone, H100, packs=0.0) == prefill_s(alone, H100)
    assert prefill_s(PROMPT, H100, packs=0.0) == prefill_s(PROMPT, H100)


def test_which_gpus_overlap_and_how_fast_their_clock_is(tmp_path: Path) -> None:
    found = {name: expected.rates_of(machine.find(name)) for name in ("h200", "b200", "a100", "l40s", "rtx5090")}
    assert {name for name, rates in found.items() if rates.overlaps} == {"h200", "b200"}
    assert found["h200"].pace == 1.0 and found["a100"].pace > 1.25 and found["l40s"].pace < 0.8
    path = tmp_path / "next.toml"  # a GPU to come, of which no clock is known
    path.write_text("sms = 300\nmemory_bytes = 1e12\nmemory_bytes_per_s = 2e13\npeak_flops = { bf16 = 1e16 }\n")
    rates = expected.rates_of(machine.find(str(path)))
    assert rates.overlaps and rates.pace == 1.0
    changed = expected.rates_of(machine.change(machine.find("h100"), {"flops": 2.0}), "bfloat16")
    assert changed.vectors == 2.0 and changed.flops_per_s == pytest.approx(2 * H100.flops_per_s)


def test_programs_of_memory_bound_ops_are_those_of_their_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict loads no torch, so it has the plans' rules a second time: they must not part."""
    torch = pytest.importorskip("torch")
    from sublight.backend.device import PRETEND, Facts
    from sublight.ops.movement.permute import plan_permute
    from sublight.ops.norm import rms_norm
    from sublight.ops.reduce.reduce import REDUCE_SUM

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # which has tiles of its own

    def empty(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    token = PRETEND.set(Facts())
    try:
        for rows, cols in ((960, 4096), (4096, 4096), (100, 12288)):
            turned = expected.rows_of("transpose", {"rows": rows, "cols": cols}, "fwd")
            assert plan_permute(empty(rows, cols), (1, 0)).steps[0].grid == (turned.programs(SMS),)
        for count, cols in ((100, 768), (4095, 768), (18944, 3072), (5120, 4800)):
            summed = expected.rows_of("reduce_sum", {"outer": 1, "n": count, "inner": cols}, "fwd")
            plan = REDUCE_SUM.plan(empty(1, count, cols), 1)
            assert len(plan.steps) == (2 if summed.shares(SMS) > 1 else 1)
            assert summed.programs(SMS) == pytest.approx(plan.steps[0].grid[0], rel=0.1)
        for rows, cols in ((100, 4096), (700, 4608), (2652, 1536), (7065, 3584), (18326, 8192)):
            norm = expected.rows_of("rms_norm", {"rows": rows, "cols": cols}, "bwd")
            per_row = torch.empty(rows, device="meta")
            plan = rms_norm.plan_backward(empty(rows, cols), empty(rows, cols), empty(cols), None, per_row)
            assert 0.5 <= norm.programs(SMS) / plan.steps[0].grid[0] <= 2  # tiles that were tried have other numbers
    finally:
        PRETEND.reset(token)


def test_a_sum_over_many_rows_has_a_second_launch_and_few_rows_have_none() -> None:
    fitted = {**table.parameters("stream"), "join_s": 5e-6}
    seconds = []
    for count in (2 * analytic.COLUMN_ROWS, 2 * analytic.COLUMN_ROWS + 1):
        rows = expected.rows_of("reduce_sum", {"outer": 1, "n": count, "inner": 1024}, "fwd")
        without = analytic.stream_s(1 << 20, 1, H200, {**fitted, "join_s": 0.0}, rows)
        seconds.append(analytic.stream_s(1 << 20, 1, H200, fitted, rows) - without)
    assert seconds == pytest.approx([0.0, 5e-6])


def test_rows_are_looked_up_by_the_block_that_holds_them() -> None:
    """4,608 columns run as 8,192 do, not as 4,096."""
    sizes = [
        expected.stream_sizes(1 << 25, expected.rows_of("rms_norm", {"rows": 900, "cols": cols}, "fwd"))
        for cols in (4096, 4608, 8192)
    ]
    assert sizes[0] != sizes[1] == sizes[2]
