"""What carries over from the GPU that the parameters were fitted to: cycles, tensor cores, and what they wait for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sublight.predict import analytic, expected, machine, table
from sublight.predict.analytic import Heads, Rates

H100 = expected.rates_of(machine.find("h100"), "bfloat16")
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
