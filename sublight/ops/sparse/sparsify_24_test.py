"""The choice against one by brute force, the storage against CUTLASS's, ties, zeros and strange values, bad input."""

from __future__ import annotations

import itertools
import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import sublight
from sublight.errors import BadInput
from sublight.ops.sparse.sparsify_24 import launch, patterns, reference, unpack_24


def test_there_are_ninety_patterns_and_no_other() -> None:
    expected = set()
    for rows in itertools.product(range(16), repeat=4):
        columns = (sum(row >> col & 1 for row in rows) for col in range(4))
        if all(row.bit_count() == 2 for row in rows) and set(columns) == {2}:
            expected.add(sum(row << 4 * place for place, row in enumerate(rows)))
    assert len(expected) == len(patterns()) == 90 and set(patterns()) == expected


@pytest.mark.parametrize("both", [False, True])
def test_the_largest_stay(both: bool, device: str) -> None:
    w = torch.randn(8, 20 if not both else 24, generator=torch.Generator().manual_seed(0)).to(device)
    packed, meta, *turned = launch(w, both)
    whole = unpack_24(packed, meta, w.shape[1]).cpu()
    w = w.cpu()
    assert torch.equal(whole[whole != 0], w[whole != 0])  # nothing but zeros is new
    for four, chosen in zip(w.reshape(-1, 4), whole.reshape(-1, 4), strict=True):
        assert (chosen != 0).sum() == 2
        if not both:
            assert math.isclose(float(chosen.abs().sum()), float(four.abs().topk(2).values.sum()), rel_tol=1e-6)
    if both:
        assert torch.equal(unpack_24(*turned, w.shape[0]).cpu(), whole.T)
        bits = torch.tensor(patterns())[:, None] >> torch.arange(16) & 1
        for row, col in itertools.product(range(0, 8, 4), range(0, 24, 4)):
            sums = (w[row : row + 4, col : col + 4].abs().flatten() * bits).sum(1)
            kept = whole[row : row + 4, col : col + 4].abs().sum()
            assert math.isclose(float(kept), float(sums.max()), rel_tol=1e-6)


def test_storage_is_cutlasss_before_its_reordering(device: str) -> None:
    conversions = pytest.importorskip("torch.sparse._semi_structured_conversions")
    w = torch.randn(32, 128, generator=torch.Generator().manual_seed(0)).half().to(device)
    packed, meta = launch(w)
    theirs, theirs_meta = conversions.sparse_semi_structured_from_dense_cutlass(unpack_24(packed, meta, 128))
    offsets = conversions._calculate_meta_reordering_scatter_offsets(32, 8, torch.int16, w.device)
    assert torch.equal(packed, theirs)
    assert torch.equal(torch.empty_like(meta.flatten()).scatter(0, offsets, meta.flatten()).view(32, 8), theirs_meta)
    dense_bytes = w.nbytes
    assert 16 * (packed.nbytes + meta.nbytes) == 9 * dense_bytes
    assert 8 * sum(x.nbytes for x in launch(w, True)) == 9 * dense_bytes


@pytest.mark.parametrize("both", [False, True])
def test_ties_zeros_and_strange_values(both: bool, device: str) -> None:
    w = torch.zeros(16, 16, device=device)
    w[1] = 1.0
    w[4, 4], w[5, 5], w[6, 6:8] = math.nan, math.inf, -math.inf
    w[8:12, 8:12] = torch.randint(-1, 2, (4, 4), generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(launch(w, both), reference(w, both), strict=True):
        assert torch.equal(ours.nan_to_num(nan=7.0), theirs.nan_to_num(nan=7.0))
    whole = unpack_24(*launch(w, both)[:2], 16)
    assert whole[4, 4].isnan() and whole[5, 5].isinf() and whole[6, 6:8].isinf().all()


def test_bad_input_is_refused_in_one_line() -> None:
    for call, words in (
        (lambda: sublight.sparsify_24(torch.ones(4, 6)), "columns in fours, not \\(4, 6\\)"),
        (lambda: sublight.sparsify_24(torch.ones(6, 4), True), "rows and columns in fours"),
        (lambda: sublight.sparsify_24(torch.ones(4)), "takes a matrix"),
        (lambda: sublight.sparsify_24(torch.ones(4, 4, dtype=torch.int32)), "floating point, not int32"),
        (lambda: unpack_24(torch.ones(4, 2), torch.ones(4, 1), 8), "do not fit 8 columns"),
    ):
        with pytest.raises(BadInput, match=words):
            call()
    assert sublight.sparsify_24(torch.ones(0, 4))[0].shape == (0, 2)
