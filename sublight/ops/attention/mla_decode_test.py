"""Latent attention over pages: by the rule, cut or whole, blind to what lies past a sequence, the same in any batch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.attention.mla_decode import MLA_DECODE, _mla_decode, mla_decode, plan, reference

SHAPE = {"batch": 3, "heads": 5, "kv_len": 70, "value_dim": 32, "rope_dim": 16, "page": 7, "ragged": 1}
HOW: dict[str, Any] = {"scale": 0.2, "value_dim": 32}
DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys_per_program", [16, 1000])
def test_right_by_the_rule_cut_and_whole(keys_per_program: int, dtype: str, device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        x = MLA_DECODE.inputs(SHAPE, dtype, device, seed)
        lengths = torch.tensor([70, 0, 33], device=device, dtype=torch.int32)  # one sequence has nothing

        def ours(*x: Any) -> Any:
            return mla_decode(*x, lengths, **HOW, keys_per_program=keys_per_program, provider="sublight")

        return correct.forward_errors(ours, lambda *x: reference(*x, lengths, **HOW), x[:3])

    error = correct.settled(draw, times=16)
    assert error.ok, error


def test_what_lies_past_a_sequence_changes_nothing(device: str) -> None:
    q, cache, table, lengths = MLA_DECODE.inputs(SHAPE, "float16", device, 0)
    expected = mla_decode(q, cache, table, lengths, **HOW, provider="sublight")
    poisoned = torch.full_like(cache, float("nan"))
    for entry, length in enumerate(lengths.tolist()):
        for key in range(length):
            at = int(table[entry, key // 7]), key % 7
            poisoned[at] = cache[at]
    assert torch.equal(mla_decode(q, poisoned, table, lengths, **HOW, provider="sublight"), expected)


def test_a_sequence_has_the_same_bits_whatever_else_is_in_the_batch(device: str) -> None:
    q, cache, table, lengths = MLA_DECODE.inputs(SHAPE, "float16", device, 0)
    together = mla_decode(q, cache, table, lengths, **HOW, keys_per_program=32, provider="sublight")
    for entry in range(3):
        own = (x[entry : entry + 1] for x in (q, table, lengths))
        alone, its_table, its_length = own
        out = mla_decode(alone, cache, its_table, its_length, **HOW, keys_per_program=32, provider="sublight")
        assert torch.equal(out[0], together[entry])


def test_a_page_or_a_length_that_is_not_there_gives_nan(device: str) -> None:
    q, cache, table, _ = MLA_DECODE.inputs(SHAPE, "float32", device, 0)
    table = table.clone()
    table[0, 1], lengths = 999, torch.tensor([30, 71, 40], device=device, dtype=torch.int32)  # a row holds 70
    for way in (_mla_decode.by_kernels, _mla_decode.reference):  # what is not ours looks at no numbers on a GPU, either
        out = way(q, cache, table, lengths, 0.2, 32, 0, "sublight")
        assert out[:2].isnan().all() and out[2].isfinite().all()


def test_the_plan_says_how_it_is_cut(device: str) -> None:
    x = MLA_DECODE.inputs(SHAPE, "float16", device, 0)
    made = plan(*x, **HOW, keys_per_program=32)
    parts = 2 if HAS_GPU else 3  # of 70 keys, in blocks of 64 on a GPU
    assert made.kernel == "_mla_kernel, _mla_combine_kernel" and f"{parts} a sequence" in made.reason
    assert "powers of two" in plan(*x, scale=0.2, value_dim=40).reason
    with pytest.raises(BadInput, match="powers of two"):
        mla_decode(*x, value_dim=40, provider="sublight")


Q, CACHE = torch.zeros(2, 3, 48), torch.zeros(4, 8, 48)
TABLE, LENGTHS = torch.tensor([[0, 1], [2, 3]]), torch.tensor([3, 16])


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((Q, CACHE[..., :40], TABLE, LENGTHS), {}, "of one data type"),
        ((Q, CACHE, TABLE[:1], LENGTHS), {}, r"use int32 \(2, pages\)"),
        ((Q, CACHE, TABLE, LENGTHS.float()), {}, "lengths are"),
        ((Q, CACHE, TABLE, LENGTHS), {"value_dim": 64}, "value_dim 64 of rows of 48"),
        ((Q, CACHE, TABLE + 1, LENGTHS), {}, r"block_table\[1, 1\] is 4"),
        ((Q, CACHE, TABLE, LENGTHS + 1), {}, "sequence 1 has length 17"),
    ],
)
def test_bad_input_gets_one_line(args: tuple[torch.Tensor, ...], options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        mla_decode(*args, **({"scale": 0.1, "value_dim": 32} | options))
    assert "\n" not in str(caught.value)
