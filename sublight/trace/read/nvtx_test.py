"""NVTX texts: ops as torch.autograd.profiler.emit_nvtx writes them, and a user's own ranges."""

from __future__ import annotations

import pytest

from sublight.trace.read import nvtx
from sublight.trace.record import NONE, Kind


@pytest.mark.parametrize(
    ("text", "name", "sequence", "sizes"),
    [
        ("aten::empty, op_id = 990346", "aten::empty", NONE, ""),
        ("aten::mm, seq = 5, op_id = 7, sizes = [[2, 3], [3, 4]]", "aten::mm", 5, "[[2, 3], [3, 4]]"),
        ("aten::mm, sizes = [[2, 3]], input_op_ids = [[(4,0)], []]", "aten::mm", NONE, "[[2, 3]]"),
        ("aten::add_, seq = 0, op_id = 7, input_op_ids = [(4,0)]", "aten::add_", 0, ""),
        ("AddmmBackward0, seq = 12, op_id = 3", "AddmmBackward0", 12, ""),
        ("AddmmBackward0, op_id = 3", "AddmmBackward0", NONE, ""),
        ("FlashAttnFunc, seq = 45440, op_id = 990760", "FlashAttnFunc", 45440, ""),
        (
            "autograd::engine::evaluate_function: AddmmBackward0, op_id = 3",
            "autograd::engine::evaluate_function: AddmmBackward0",
            NONE,
            "",
        ),
        ("autograd::engine::evaluate_function: X", "autograd::engine::evaluate_function: X", NONE, ""),
        ("aten::mm", "aten::mm", NONE, ""),  # before op ids
        ("flash_attn::_flash_attn_forward, op_id = 9", "flash_attn::_flash_attn_forward", NONE, ""),
        ("record_param_comms, op_id = 9", "record_param_comms", NONE, ""),
    ],
)
def test_what_emit_nvtx_writes_is_an_op(text: str, name: str, sequence: int, sizes: str) -> None:
    assert nvtx.read(text) == nvtx.Range(kind=Kind.OP, name=name, sequence=sequence, sizes=sizes)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("forward", "forward"),
        ("forward, op_id = 4", "forward"),  # record_function under emit_nvtx
        ("Optimizer.step#AdamW.step, op_id = 4", "Optimizer.step#AdamW.step"),
        ("load a, then b, op_id = 4", "load a, then b"),
        ("nccl:all_to_all, op_id = 4", "nccl:all_to_all"),
        ("FSDP::pre_forward (blocks.1), op_id = 4", "FSDP::pre_forward (blocks.1)"),
        ("ncclAllReduce", "ncclAllReduce"),
        ("engine::decode", "engine::decode"),  # somebody's C++
        ("aten::mm is slow", "aten::mm is slow"),
        ("epoch, seq = x", "epoch, seq = x"),
        (", op_id = 4", ", op_id = 4"),
        ("", ""),
        ("two\nlines", "two\nlines"),
    ],
)
def test_a_users_text_is_a_range(text: str, name: str) -> None:
    assert nvtx.read(text) == nvtx.Range(kind=Kind.RANGE, name=name)


@pytest.mark.parametrize(
    "sizes", ["[", "[[2, 3]", "[2, 3]", "[[[[2]]]]", "[[-1]]", "[[1e3]]", "[[99999999999999999999]]", "[" * 100_000]
)
def test_sizes_that_are_no_shapes_are_none(sizes: str) -> None:
    assert nvtx.dims(sizes) == ()
