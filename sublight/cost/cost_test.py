"""Costs by hand for every name, one table of data types, and nothing heavy imported."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

from sublight import cost
from sublight.cost import COSTS, DIRECTIONS, ITEMSIZE, SPELLINGS, Cost, dtypes
from sublight.cost.tensor import Tensor, dense, over
from sublight.errors import BadInput

ROWS = {"rows": 8, "cols": 16}  # 128 elements, 256 bytes in bf16
HEADS = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": 3, "head_dim": 8}  # q and k together: 6 tokens x 6 heads x 8
ATTENTION = {**HEADS, "kv_len": 5, "causal": 0}
# name, shape, direction, read_bytes, write_bytes, FLOPs; bf16 throughout
BY_HAND = (
    ("add", {"numel": 128}, "fwd", 512, 256, 128),
    ("add", {"numel": 128}, "bwd", 0, 0, 0),
    ("gelu", ROWS, "fwd", 256, 256, 8 * 128),
    ("gelu", ROWS, "bwd", 512, 256, 12 * 128),
    ("gelu_tanh", ROWS, "bwd", 512, 256, 12 * 128),
    ("relu2", ROWS, "fwd", 256, 256, 8 * 128),
    ("bias_gelu", ROWS, "fwd", 256 + 32, 256, 9 * 128),
    ("bias_gelu", ROWS, "bwd", 512 + 32, 256 + 32, 14 * 128),
    ("bias_dropout_residual", ROWS, "fwd", 512 + 32, 256, 4 * 128),
    ("bias_dropout_residual", ROWS, "bwd", 256, 256 + 32, 2 * 128),
    ("swiglu", ROWS, "fwd", 512, 256, 9 * 128),
    ("swiglu", ROWS, "bwd", 768, 512, 14 * 128),
    ("geglu", ROWS, "bwd", 768, 512, 14 * 128),
    ("softmax", ROWS, "fwd", 256, 256, 5 * 128),
    ("softmax", ROWS, "bwd", 512, 256, 4 * 128),
    ("softmax", ROWS, "fwd+bwd", 768, 512, 9 * 128),
    ("log_softmax", ROWS, "fwd", 256, 256, 6 * 128),
    ("log_softmax", ROWS, "bwd", 512, 256, 4 * 128),
    ("online_softmax", ROWS, "fwd", 256, 256 + 32, 5 * 128),
    ("online_softmax", ROWS, "bwd", 512 + 32, 256, 4 * 128),
    ("softmax_topk", ROWS, "fwd", 256, 8 * 8 * (2 + 8), 5 * 128),
    ("sample", {"rows": 8, "vocab": 16}, "fwd", 256 + 8, 64, 128),
    ("layer_norm", ROWS, "fwd", 256 + 64, 256, 7 * 128),
    ("layer_norm", ROWS, "bwd", 512 + 32, 256 + 64, 12 * 128),
    ("rms_norm", ROWS, "fwd", 256 + 32, 256, 4 * 128),
    ("rms_norm", ROWS, "bwd", 512 + 32, 256 + 32, 9 * 128),
    ("add_layer_norm", ROWS, "fwd", 512 + 64, 512, 8 * 128),
    ("add_layer_norm", ROWS, "bwd", 768 + 32, 256 + 64, 13 * 128),
    ("add_rms_norm", ROWS, "fwd", 512 + 32, 512, 5 * 128),
    ("add_rms_norm", ROWS, "bwd", 768 + 32, 256 + 32, 10 * 128),
    ("rms_norm_int8", ROWS, "fwd", 256 + 32, 128 + 32, 6 * 128),
    ("rms_norm_fp8", ROWS, "fwd", 256 + 32, 128 + 32, 6 * 128),
    ("quantize_int8", ROWS, "fwd", 256, 128 + 32, 3 * 128),
    ("quantize_fp8", ROWS, "fwd", 256, 128 + 32, 3 * 128),
    ("quantize_int8_blocks", {"rows": 2, "cols": 129}, "fwd", 516, 258 + 4 * 2 * 2, 3 * 258),
    ("quantize_fp8_blocks", {"rows": 2, "cols": 129}, "fwd", 516, 258 + 4 * 2 * 2, 3 * 258),
    ("rope", HEADS, "fwd", 2 * (288 + 24), 2 * 288, 3 * 288),
    ("rope", HEADS, "bwd", 2 * (288 + 24), 2 * 288, 3 * 288),
    ("rope_", HEADS, "fwd", 2 * (288 + 24), 2 * 288, 3 * 288),
    ("qk_norm_rope", HEADS, "fwd", 2 * (288 + 24 + 16), 2 * 288, 7 * 288),
    ("qk_norm_rope", HEADS, "bwd", 2 * (2 * 288 + 24 + 16), 2 * (288 + 16), 14 * 288),
    ("embedding", {"rows": 1, "cols": 16, "vocab": 100}, "fwd", 8 + 32, 32, 0),
    ("embedding", {"rows": 2, "cols": 16, "vocab": 100}, "bwd", 16 + 64, 3200, 32),
    ("permute", {"a": 2, "b": 3, "order": 201}, "fwd", 12, 12, 0),
    ("permute", {"a": 2, "b": 3, "order": 201}, "bwd", 0, 0, 0),
    ("transpose", {"batch": 2, "rows": 3, "cols": 4}, "fwd", 48, 48, 0),
    ("compact", {"numel": 10}, "fwd", 30, 20 + 8, 0),
    ("compact", {"numel": 10}, "bwd", 30, 20, 0),
    ("reduce_sum", {"outer": 2, "n": 5, "inner": 3}, "fwd", 60, 12, 30),
    ("reduce_sum", {"outer": 2, "n": 5, "inner": 3}, "bwd", 0, 0, 0),
    ("reduce_max", {"outer": 2, "n": 5, "inner": 3}, "bwd", 12 + 48, 60, 0),
    ("reduce_argmax", {"outer": 2, "n": 5, "inner": 3}, "fwd", 60, 48, 30),
    ("cumsum", ROWS, "bwd", 256, 256, 2 * 128),
    ("adamw", {"tensors": 2, "numel": 10}, "fwd", 20 * 12, 20 * 10, 15 * 20),
    ("adamw_clipped", {"tensors": 2, "numel": 10}, "fwd", 20 * 14, 20 * 10, 15 * 20),
    ("cross_entropy", ROWS, "fwd", 256 + 64, 2, 4 * 128),
    ("cross_entropy", ROWS, "bwd", 0, 0, 0),
    ("cross_entropy", ROWS, "fwd+bwd", 256 + 64, 2 + 256, 8 * 128),
    ("linear_cross_entropy", {**ROWS, "vocab": 5}, "fwd", 256 + 160 + 64, 2, 2 * 128 * 5),
    ("linear_cross_entropy", {**ROWS, "vocab": 5}, "fwd+bwd", 256 + 160 + 64, 2 + 256 + 160, 6 * 128 * 5),
    ("matmul", {"m": 2, "n": 3, "k": 4}, "fwd", 2 * (8 + 12), 2 * 6, 48),
    ("matmul", {"m": 2, "n": 3, "k": 4}, "bwd", 2 * (6 + 8 + 12), 2 * (8 + 12), 96),
    ("linear", {"m": 2, "n": 3, "k": 4}, "fwd", 2 * (8 + 12 + 3), 2 * 6, 48),
    ("linear", {"m": 2, "n": 3, "k": 4}, "bwd", 2 * (6 + 8 + 12), 2 * (8 + 12 + 3), 96),
    ("batched_matmul", {"batch": 5, "m": 2, "n": 3, "k": 4}, "fwd", 200, 60, 240),
    ("batched_matmul", {"batch": 5, "m": 2, "n": 3, "k": 4}, "bwd", 260, 200, 480),
    ("low_bit_matmul", {"m": 1, "n": 3, "k": 8, "bits": 4, "group": 4}, "fwd", 16 + 12 + 12, 6, 48),
    ("scaled_matmul", {"m": 2, "n": 3, "k": 4, "block": 0}, "fwd", 2 * (8 + 12) + 4 * 5, 2 * 6, 48),
    ("scaled_matmul", {"m": 2, "n": 3, "k": 4, "block": 2}, "fwd", 2 * (8 + 12) + 4 * 10, 2 * 6, 48),
    ("rms_norm_linear", {"n": 3, "k": 8, "gated": 0}, "fwd", 16 + 16 + 48, 6, 48),
    ("rms_norm_linear", {"n": 3, "k": 8, "gated": 1}, "fwd", 16 + 16 + 96, 6, 96),
    ("row_linear", {"n": 3, "k": 8, "bits": 4, "group": 4, "gated": 1}, "fwd", 16 + 16 + 24 + 48, 6, 96),
    ("grouped_matmul", {"m": 6, "n": 3, "k": 4, "groups": 2}, "fwd", 48 + 48, 36, 144),
    ("moe_routing", {"tokens": 4, "experts": 8, "top_k": 2}, "fwd", 64, 8 * (4 + 4), 5 * 32),
    ("moe_experts", {"tokens": 4, "hidden": 8, "inner": 16, "experts": 16, "top_k": 2}, "fwd",
     64 + 8 * 2 * (32 * 8 + 8 * 16) + 8 * (4 + 4), 64, 2 * 8 * (32 * 8 + 8 * 16)),
    ("moe_experts", {"tokens": 4, "hidden": 8, "inner": 16, "experts": 16, "top_k": 2}, "bwd",
     2 * 64 + 512 + 8192 + 4096 + 32 + 32, 64 + 8192 + 4096 + 32, 2 * 2 * 8 * (32 * 8 + 8 * 16)),
    ("sparsify_24", {"rows": 32, "cols": 64, "both": 0}, "fwd", 4096, 2048 + 256, 4 * 2048),
    ("sparsify_24", {"rows": 32, "cols": 64, "both": 1}, "fwd", 4096, 2 * (2048 + 256), 4 * 2048),
    ("attention", ATTENTION, "fwd", 2 * 192 + 2 * 2 * 160, 2 * 192, 2 * 8 * 15 * 16),
    ("attention", {**ATTENTION, "causal": 1}, "fwd", 2 * 192 + 2 * 2 * 160, 2 * 192, 2 * 8 * 12 * 16),
    ("attention", ATTENTION, "bwd", 3 * 2 * 192 + 4 * 24 + 2 * 2 * 160, 2 * (192 + 2 * 160), 5 * 8 * 15 * 16),
    ("packed_attention", {**ATTENTION, "causal": 1}, "fwd", 2 * 192 + 2 * 2 * 160, 2 * 192, 2 * 8 * 12 * 16),
    ("packed_attention", {**ATTENTION, "ragged": 1}, "fwd", 2 * 128 + 2 * 2 * 128, 2 * 128, 2 * 4 * (3 + 15) * 16),
    ("paged_prefill", ATTENTION, "fwd", 2 * 192 + 2 * 2 * 160, 2 * 192, 2 * 8 * 12 * 16),
    ("paged_attention", {**ATTENTION, "q_len": 1}, "fwd", 2 * 64 + 2 * 2 * 160, 2 * 64, 2 * 8 * 5 * 16),
    ("paged_attention", {**ATTENTION, "q_len": 1, "ragged": 1}, "fwd", 2 * 64 + 2 * 2 * 96, 2 * 64, 2 * 8 * 3 * 16),
    ("cascade", {**ATTENTION, "q_len": 1, "prefix_len": 7, "ragged": 0}, "fwd",
     2 * 64 + 2 * 2 * 160 + 2 * 2 * 7 * 16, 2 * 64, 2 * 8 * 5 * 16 + 2 * 8 * 7 * 16),
    ("mla_decode", {"batch": 3, "heads": 4, "kv_len": 5, "value_dim": 16, "rope_dim": 8, "page": 4, "ragged": 0}, "fwd",
     2 * 24 * (3 * 4 + 15), 2 * 16 * 12, 2 * 15 * 4 * (24 + 16)),
    ("kv_copy", {"pairs": 3, "kv_heads": 2, "head_dim": 8, "page": 4}, "fwd", 2 * 2 * 192 + 2 * 24, 2 * 2 * 192, 0),
    *(
        ("kv_gather", {"batch": 3, "kv_heads": 2, "kv_len": 5, "head_dim": 8, "page": 4, "ragged": ragged}, "fwd",
         2 * 2 * 16 * keys, 2 * 2 * 16 * 24, 0)
        for ragged, keys in ((0, 15), (1, 9))
    ),
    ("kv_write", {"tokens": 3, "kv_heads": 2, "head_dim": 8}, "fwd", 2 * 2 * 48 + 8 * 3, 2 * 2 * 48, 0),
    ("rope_kv_write", {"tokens": 3, "heads": 4, "kv_heads": 2, "head_dim": 8}, "fwd",
     2 * (96 + 2 * 48 + 24) + 2 * 8 * 3, 2 * (96 + 2 * 48), 3 * 3 * 6 * 8),
    ("conv2d", {"batch": 2, "in_channels": 3, "out_channels": 4, "size": 5, "taps": 3, "padding": 1}, "fwd",
     2 * (150 + 108), 2 * 200, 2 * 200 * 27),
    ("conv2d", {"batch": 2, "in_channels": 3, "out_channels": 4, "size": 5, "taps": 3, "padding": 1}, "bwd",
     2 * (200 + 150 + 108), 2 * (150 + 108), 4 * 200 * 27),
    ("all_reduce", {"numel": 64, "ranks": 8}, "fwd", 128, 128, 0),
    ("all_gather", {"numel": 64, "ranks": 8}, "fwd", 16, 128, 0),
    ("reduce_scatter", {"numel": 64, "ranks": 8}, "fwd", 128, 16, 0),
    ("all_to_all", {"numel": 64, "ranks": 8}, "fwd", 128, 128, 0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "shape", "direction", "read", "written", "flops"), BY_HAND, ids=[f"{row[0]}-{row[2]}" for row in BY_HAND]
)
def test_cost_by_hand(name: str, shape: dict[str, int], direction: str, read: int, written: int, flops: float) -> None:
    found = cost.find(name)(shape, "bfloat16", direction)  # type: ignore[arg-type]
    assert (found.read_bytes, found.write_bytes, found.total_flops) == (read, written, flops)


def test_every_name_is_checked_by_hand() -> None:
    assert {row[0] for row in BY_HAND} == set(COSTS)


def test_every_cost_of_a_shape_has_a_name() -> None:
    for path in Path(cost.__file__).parent.glob("*.py"):
        if path.stem.endswith("_test") or path.stem == "__init__":
            continue
        module = importlib.import_module(f"sublight.cost.{path.stem}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            own = function.__module__ == module.__name__ and not name.startswith("_")
            if own and list(inspect.signature(function).parameters)[:3] == ["shape", "dtype", "direction"]:
                assert function in COSTS.values(), f"{path.stem}.{name} is not in COSTS"


def test_the_ops_use_the_function_of_their_name() -> None:
    pytest.importorskip("torch")
    from sublight.ops import OPS

    assert [op.name for op in OPS if op.cost is not cost.find(op.name)] == []


def test_both_directions_are_two_launches_one_after_the_other() -> None:
    each = [cost.find("rms_norm")(ROWS, "float16", direction) for direction in DIRECTIONS]
    assert each[2] == each[0] + each[1] and each[2].launches == 2


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    with pytest.raises(BadInput, match="'rms_nrom': did you mean rms_norm"):
        cost.find("rms_nrom")


PROBE = """
import json, sys, time
start = time.process_time()
import sublight.cost
took = time.process_time() - start
sublight.cost.find("rms_norm")({"rows": 8, "cols": 16}, "bfloat16", "fwd")
heavy = sorted({"torch", "triton", "numpy", "msgspec"} & {name.partition(".")[0] for name in sys.modules})
print(json.dumps({"took_s": took, "heavy": heavy}))
"""


def test_importing_costs_takes_milliseconds_and_nothing_heavy() -> None:
    """CPU time of the fastest of three processes: a busy machine does not lengthen it much."""
    runs = [json.loads(subprocess.check_output([sys.executable, "-c", PROBE])) for _ in range(3)]
    assert runs[0]["heavy"] == []
    assert min(run["took_s"] for run in runs) < 0.1  # 0.02 s on a quiet machine


def test_sizes_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    known = {row.name: getattr(torch, row.name, None) for row in dtypes.TABLE}
    assert len([name for name, dtype in known.items() if dtype is not None]) > 15
    for name, dtype in known.items():
        if dtype is not None and name in ITEMSIZE:
            assert ITEMSIZE[name] == dtype.itemsize, name


def test_packed_types_take_less_than_a_byte() -> None:
    assert "int4" not in ITEMSIZE and dense("int4", 3, 5).bytes == 8  # 15 half bytes
    assert dense("float4_e2m1fn", 4).bytes == 2 and dense("float4_e2m1fn_x2", 2).bytes == 2


def test_no_spelling_means_two_types() -> None:
    every = [word for row in dtypes.TABLE for word in (row.name, *row.spellings)]
    assert len(every) == len(set(every))
    assert all(dtypes.name_dtype(word) == SPELLINGS.get(word, word) for word in every)
    assert dtypes.name_dtype("fp8_e5m2") == "float8_e5m2" and dtypes.name_dtype("Long") == "int64"


@pytest.mark.parametrize(
    ("dtype", "matmul", "vector"),
    [
        ("float64", "matmul_fp64", "vector_fp64"),
        ("complex128", "matmul_fp64", "vector_fp64"),
        ("float32", "matmul_fp32", "vector_fp32"),
        ("float16", "matmul_fp16", "vector_fp32"),
        ("float8_e5m2", "matmul_fp8", "vector_fp32"),
        ("float4_e2m1fn_x2", "matmul_fp4", "vector_fp32"),
        ("uint8", "matmul_int8", "vector_int32"),
        ("bool", "matmul_fp32", "vector_int32"),
        ("2-byte", "matmul_fp32", "vector_fp32"),
    ],
)
def test_limits_of_arithmetic(dtype: str, matmul: str, vector: str) -> None:
    assert (dtypes.matmul_limit(dtype), dtypes.vector_limit(dtype)) == (matmul, vector)
    tf32 = "matmul_tf32" if matmul == "matmul_fp32" else matmul
    assert dtypes.matmul_limit(dtype, tf32=True) == tf32


def test_what_lies_in_memory_once_is_read_once() -> None:
    expanded = Tensor(shape=(8, 16), dtype="float32", strides=(0, 1))
    windows = Tensor(shape=(15, 2), dtype="float32", strides=(1, 1))
    assert (expanded.bytes, expanded.real_bytes, windows.real_bytes) == (512, 64, 64)
    assert over([expanded], [expanded]) == Cost(read_bytes=64, write_bytes=512)


@pytest.mark.parametrize(
    ("way", "read", "written", "link", "up", "down"),
    [
        ("on_device", 100, 100, 0, 0, 0),
        ("from_host", 0, 100, 0, 100, 0),
        ("to_host", 100, 0, 0, 0, 100),
        ("peer", 100, 0, 100, 0, 0),
        ("on_host", 0, 0, 0, 0, 0),
    ],
)
def test_transfers(way: str, read: int, written: int, link: int, up: int, down: int) -> None:
    found = cost.movement.transfer(100, way)  # type: ignore[arg-type]
    assert (found.read_bytes, found.write_bytes, found.link_bytes) == (read, written, link)
    assert (found.from_host_bytes, found.to_host_bytes) == (up, down)


@pytest.mark.parametrize(
    ("name", "ranks", "link"),
    [
        *(("all_reduce", 8, 112), ("all_gather", 8, 112), ("reduce_scatter", 8, 112), ("all_to_all", 8, 112)),
        *(("all_reduce", 2, 64), ("all_reduce", 1, 0)),
    ],
)
def test_what_links_must_carry(name: str, ranks: int, link: int) -> None:
    assert cost.find(name)({"numel": 64, "ranks": ranks}, "bfloat16", "fwd").link_bytes == link


def test_a_roots_traffic_is_not_known() -> None:
    assert cost.communication.collective("broadcast", 100, 100, 8).link_bytes == 0
