"""A prefix read once for the batch: by the rule, what paged attention over prefix and own keys gives."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.attention.cascade import CASCADE, _cascade, cascade, plan, reference
from sublight.ops.attention.paged_attention import reference as paged_reference

SHAPE = {
    "batch": 9, "heads": 4, "kv_heads": 2, "prefix_len": 37, "kv_len": 20, "head_dim": 24, "page": 4, "ragged": 1,
}  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("prefix", "keys_per_program"), [(37, 16), (30, 1000), (0, 16)])
def test_right_by_the_rule_cut_and_whole(prefix: int, keys_per_program: int, dtype: str, device: str) -> None:
    def draw(seed: int) -> list[correct.Error]:
        *x, table, _ = CASCADE.inputs(SHAPE, dtype, device, seed)
        lengths = torch.tensor([0, 1, 4, 5, 20, 16, 17, 3, 0], device=device, dtype=torch.int32)  # some have none
        rest = (x[3], torch.full_like(x[4], prefix), table, lengths)

        def ours(*x: Any) -> Any:
            return cascade(*x, *rest, keys_per_program=keys_per_program, provider="sublight")

        return correct.forward_errors(ours, lambda *x: reference(*x, *rest), tuple(x[:3]))

    error = correct.settled(draw, times=16)
    assert error.ok, error


def test_it_is_paged_attention_over_one_table(device: str) -> None:
    """Where the prefix fills its pages, both in a row are an ordinary table."""

    def draw(seed: int) -> list[correct.Error]:
        *x, prefix, _, table, lengths = CASCADE.inputs(SHAPE, "float32", device, seed)
        count = torch.tensor([len(prefix) * 4], device=device)
        together = torch.cat([prefix.expand(len(x[0]), -1), table], 1)

        def ours(*x: Any) -> Any:
            return cascade(*x, prefix, count, table, lengths, provider="sublight")

        def paged(*x: Any) -> Any:
            return paged_reference(*x, together, lengths + count)

        return correct.forward_errors(ours, paged, tuple(x))

    error = correct.settled(draw)
    assert error.ok, error


def test_what_nobody_has_changes_nothing_and_what_is_not_there_shows(device: str) -> None:
    q, k, v, prefix, count, table, lengths = CASCADE.inputs(SHAPE, "float16", device, 0)
    expected = cascade(q, k, v, prefix, count, table, lengths, provider="sublight")
    for cache in (k, v):
        cache[prefix[-1], 1:] = float("nan")  # past 37 keys
        for entry, length in enumerate(lengths.tolist()):
            for key in range(length, 20):
                cache[table[entry, key // 4], key % 4] = float("nan")
    assert torch.equal(cascade(q, k, v, prefix, count, table, lengths, provider="sublight"), expected)
    table, k, v = table.clone(), k.nan_to_num(), v.nan_to_num()
    table[2, 0] = 999
    for way in (_cascade.by_kernels, _cascade.reference):  # what is not ours looks at no numbers on a GPU, either
        out = way(q, k, v, prefix, count, table, lengths, 0.2, 0, "sublight")
        assert out[2].isnan().all() and out[[0, 1, 3]].isfinite().all()
        out = way(q, k, v, prefix, count + 9, table, lengths, 0.2, 0, "sublight")  # room for 40
        assert out.isnan().all()


def test_a_sequence_has_the_same_bits_whatever_else_is_in_the_batch(device: str) -> None:
    q, k, v, prefix, count, table, lengths = CASCADE.inputs(SHAPE, "float16", device, 0)
    how: dict[str, Any] = {"keys_per_program": 16, "provider": "sublight"}
    together = cascade(q, k, v, prefix, count, table, lengths, **how)
    for entry in (0, 8):
        own = slice(entry, entry + 1)
        alone = cascade(q[own], k, v, prefix, count, table[own], lengths[own], **how)
        assert torch.equal(alone[0], together[entry])


def test_the_plan_reads_the_prefix_once(device: str) -> None:
    x = CASCADE.inputs(SHAPE, "float16", device, 0)
    made = plan(*x, keys_per_program=16)
    assert [step.name for step in made.steps] == ["_cascade_kernel", "_cascade_kernel", "_merge_kernel"]
    if not HAS_GPU:  # 18 rows are two tiles of 16 on each of two heads; 40 keys three parts
        assert made.steps[0].grid == (2 * 2 * 3,) and made.steps[1].grid == (9 * 2 * 2,)


Q, CACHE = torch.zeros(2, 2, 16), torch.zeros(6, 4, 1, 16)
TABLE, LENGTHS, PREFIX, COUNT = torch.tensor([[0], [1]]), torch.tensor([3, 4]), torch.tensor([2, 3]), torch.tensor([8])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((Q, CACHE, CACHE, PREFIX, COUNT + 1, TABLE, LENGTHS), "the prefix has length 9"),
        ((Q, CACHE, CACHE, PREFIX + 3, COUNT, TABLE, LENGTHS), "page 1 of the prefix is 6"),
        ((Q, CACHE, CACHE, PREFIX[None], COUNT, TABLE, LENGTHS), r"prefix_table is .* use int32 \(pages,\)"),
        ((Q, CACHE, CACHE, PREFIX, LENGTHS, TABLE, LENGTHS), r"prefix_length is .* use int32 \(1,\)"),
        ((Q, CACHE, CACHE, PREFIX, COUNT, TABLE, LENGTHS + 1), "sequence 1 has length 5"),
        ((Q, CACHE.half(), CACHE.half(), PREFIX, COUNT, TABLE, LENGTHS), "make them alike"),
    ],
)
def test_bad_input_gets_one_line(args: tuple[torch.Tensor, ...], words: str) -> None:
    with pytest.raises(BadInput, match=words) as caught:
        cascade(*args)
    assert "\n" not in str(caught.value)
