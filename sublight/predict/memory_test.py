"""Memory against what the end-to-end runs peaked at, and the largest batch against the memory that it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sublight import units
from sublight.predict import config, estimate, machine, memory, model
from sublight.predict.step import Parallel, Precision, Step

RUN = Path(__file__).parents[2] / "benchmarks" / "end_to_end_h200.json"
DOCS = Path(__file__).parents[2] / "docs" / "predict.md"
BAR = 0.05
STEPS = {  # as benchmarks/end_to_end.py runs them: everything in bf16, Adam's averages too
    "llama-train": ("llama-3.2-1b", 4, 2048),
    "gpt2-train": ("gpt2", 16, 1024),
}


@pytest.mark.parametrize("part", STEPS)
@pytest.mark.parametrize("variant", ["eager", "patched"])
def test_peaks_of_the_training_runs(part: str, variant: str) -> None:
    rows = json.loads(RUN.read_text(encoding="utf-8"))["rows"]
    measured = next(row["peak_bytes"] for row in rows if (row["part"], row["variant"]) == (part, variant))
    name, batch, context = STEPS[part]
    precision = Precision(optimizer="bfloat16")
    step = Step(mode="train", batch=batch, context=context, precision=precision, eager=variant == "eager")
    found = memory.memory(config.load(name), step).total
    assert found == pytest.approx(measured, rel=BAR)
    off = f"{100 * (found / measured - 1):+.1f} %".replace("-", "−")
    assert f"| {units.text(measured, 'B')} | {units.text(found, 'B')} | {off} |" in DOCS.read_text(encoding="utf-8")


def measured_step_s(file: str, **fields: Any) -> float:
    """Of the run's row that has these fields."""
    data = json.loads((RUN.parent / file).read_text(encoding="utf-8"))
    rows = data["rows"] if isinstance(data, dict) else data
    row = next(row for row in rows if all(row.get(name) == value for name, value in fields.items()))
    return float(row.get("median_s") or row.get("step_s") or row["step_ms"] / 1e3)


MEAN_CONTEXT = 1102  # tokens of a text in the decoding runs, which go from 1024 on: their rows say so
HALF = Precision(optimizer="bfloat16")
WHOLE_STEPS: tuple[tuple[float, str, Step], ...] = (
    (measured_step_s("train_step_h200.json", part="graph", batch=32), "gpt2",
     Step(mode="train", batch=32, context=1024)),
    (measured_step_s("train_step_h200.json", part="graph", batch=64), "gpt2",
     Step(mode="train", batch=64, context=1024)),
    (measured_step_s("engines_h200.json", part="decode", mode="graphs", batch=1), "llama-3-8b",
     Step(mode="decode", batch=1, context=MEAN_CONTEXT)),
    (measured_step_s("engines_h200.json", part="decode", mode="graphs", batch=64), "llama-3-8b",
     Step(mode="decode", batch=64, context=MEAN_CONTEXT)),
    (measured_step_s(RUN.name, part="llama-train", variant="patched"), "llama-3.2-1b",
     Step(mode="train", batch=4, context=2048, precision=HALF)),
    (measured_step_s("end_to_end_h200_calls.json", part="gpt2-train", variant="patched"), "gpt2",
     Step(mode="train", batch=16, context=1024, precision=HALF)),
    (measured_step_s(RUN.name, part="llama-decode", variant="patched+graph"), "llama-3.2-1b",
     Step(mode="decode", batch=1, context=640, precision=HALF, eager=True)),
    *((measured_step_s("engines_h200.json", part="decode", mode="int4", batch=batch), "llama-3-8b",
       Step(mode="decode", batch=batch, context=MEAN_CONTEXT, precision=Precision(weights="int4")))
      for batch in (1, 64)),
)  # fmt: skip


@pytest.mark.parametrize(("measured_s", "name", "step"), WHOLE_STEPS)
def test_the_docs_say_how_far_off_whole_steps_are(measured_s: float, name: str, step: Step) -> None:
    """No bar is held here: what the page says is what is predicted, and what was measured."""
    found = estimate.predict(config.load(name), machine.find("h200"), step).expected_s
    off = f"{100 * (found / measured_s - 1):+.0f} %".replace("-", "−")
    line = f"| {units.text(measured_s, 's')} | {units.text(found, 's')} | {off} |"
    assert line in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize(("measured_s", "name", "step"), WHOLE_STEPS[:5])
def test_whole_steps_of_the_code_that_is_predicted_hold_the_bar(measured_s: float, name: str, step: Step) -> None:
    """Training of GPT-2 and of a Llama of 1.2 B, decoding of one token and of 64: within 10 %."""
    found = estimate.predict(config.load(name), machine.find("h200"), step).expected_s
    assert found == pytest.approx(measured_s, rel=0.10)


def test_kinds_add_up_and_weights_are_the_parameters() -> None:
    found = config.load("llama-3-8b")
    held = memory.memory(found, Step(mode="decode", batch=8, context=4096))
    assert sum(held.kinds().values()) == held.total
    assert held.weights == 2 * model.parameters(found) and held.cache == 8 * 4096 * 131_072


@pytest.mark.parametrize("mode", ["prefill", "decode", "train"])
def test_the_largest_batch_fits_and_one_more_does_not(mode: str) -> None:
    found, room = config.load("llama-3.2-1b"), machine.find("h100").gpu.memory_bytes or 0
    step = Step(mode=mode, batch=1, context=2048)  # type: ignore[arg-type]
    best = memory.largest_batch(found, step, room)
    totals = [memory.memory(found, replace(step, batch=batch)).total for batch in (best, best + 1)]
    assert totals[0] <= memory.USABLE * room < totals[1]


def test_nothing_fits_where_the_weights_do_not() -> None:
    assert memory.largest_batch(config.load("llama-3-70b"), Step(mode="decode", batch=1, context=1), 80 << 30) == 0


def test_what_lowers_memory_lowers_it() -> None:
    found = config.load("llama-3-8b")
    step = Step(mode="train", batch=4, context=4096)
    plain = memory.memory(found, step).total
    lower = (
        replace(step, checkpointing=True),
        replace(step, lora=16),
        replace(step, parallel=Parallel(tensor=2)),
        replace(step, parallel=Parallel(pipeline=2)),
        replace(step, precision=Precision(optimizer="bfloat16")),
    )
    assert all(memory.memory(found, other).total < plain for other in lower)
    assert memory.memory(found, replace(step, eager=True)).total > plain


def test_experts_over_gpus_and_low_bits() -> None:
    found, step = config.load("deepseek-v3"), Step(mode="decode", batch=1, context=1)
    ways = Parallel(data=8, expert=8)
    spread = memory.memory(found, replace(step, parallel=ways))
    assert spread.weights < memory.memory(found, step).weights / 6
    training = memory.memory(found, replace(step, mode="train", parallel=ways))
    assert training.optimizer == 8 * (spread.weights // 2) and training.weights == spread.weights
    four = memory.memory(found, replace(step, precision=Precision(weights="int4"))).weights
    outside = model.outside_parameters(found)  # the table and the head stay in 16 bits
    assert four == pytest.approx((model.parameters(found) - outside) * (0.5 + 2 / 128) + 2 * outside, rel=1e-6)


def test_a_checkpoint_of_four_bits_has_its_table_and_head_whole() -> None:
    """An H200 held 16.35 GB of Llama 8B in 16 bits and 6.29 in four, caches included (benchmarks/engines_h200.json)."""
    found, step = config.load("llama-3-8b"), Step(mode="decode", batch=1, context=MEAN_CONTEXT)
    held = [memory.memory(found, replace(step, precision=Precision(weights=kind))) for kind in ("bfloat16", "int4")]
    rows = json.loads((RUN.parent / "engines_h200.json").read_text(encoding="utf-8"))
    run = {(row["mode"], row["batch"]): row["memory_bytes"] for row in rows}
    assert [each.total for each in held] == pytest.approx([run["graphs", 1], run["int4", 1]], rel=0.08)
    assert held[1].weights > 2 * 2 * found.hidden * found.vocab


def test_what_autograd_saves_of_a_qwen3_and_a_mixture() -> None:
    """Of 6 layers and 1000 tokens with PyTorch's own ops, counted by saved_tensors_hooks on Hugging Face's classes:
    without attention's transposed copy, which a GPU's kernels do not make. Gemma's norms multiply in float32, a Phi-3's
    values keep its queries and keys, and Gemma 2 and gpt-oss keep whole scores."""
    sizes = {"hidden_size": 512, "intermediate_size": 1400, "num_hidden_layers": 6, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 4, "vocab_size": 1003}
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    step = Step(mode="train", batch=2, context=500, eager=True)
    whole_scores = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}
    for fields, counted in (
        ({"model_type": "qwen3", "head_dim": 96}, 190.3e6),
        (mixture, 231.7e6),
        ({"model_type": "phi3"}, 148.5e6),
        ({"model_type": "gemma", "head_dim": 64}, 152.6e6),
        ({"model_type": "gemma2", "head_dim": 64}, 401.8e6),
        (whole_scores, 412.1e6),
    ):
        found = config.from_config({**sizes, **fields})
        loss = 3 * 4 * 1000 * 1003
        assert memory.memory(found, step).activations - loss == pytest.approx(counted, rel=0.035)


def test_a_cache_whose_heads_gpus_do_not_divide() -> None:
    found, step = config.load("phi-4"), Step(mode="decode", batch=1, context=4096)
    one, four = (memory.memory(found, replace(step, parallel=Parallel(tensor=ways))).cache for ways in (1, 4))
    assert four == one * 3 // 10  # 3 of 10 heads of keys


def test_a_pipeline_s_memory_is_that_of_its_fullest_stage() -> None:
    """Of Llama 3 8B over 8 GPUs: four layers, and the table of tokens or the head."""
    found, step = config.load("llama-3-8b"), Step(mode="decode", batch=1, context=4096, parallel=Parallel(pipeline=8))
    held = memory.memory(found, step)
    layers, table = 4 * model.block_parameters(found, found.blocks[0]), found.vocab * found.hidden
    assert held.weights == 2 * (layers + table + found.hidden)  # and the last norm
    uneven = replace(step, parallel=Parallel(pipeline=5))
    assert memory.memory(found, uneven).cache == held.cache * 7 // 4  # of 32 layers, seven
    tied = config.load("llama-3.2-1b")
    assert memory.memory(tied, replace(step, parallel=Parallel(pipeline=2))).weights > model.parameters(tied)
