"""Calls of many sizes that share a graph."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from sublight.fix.graph import bucket as graph_bucket
from sublight.fix.graph.callable import graph
from sublight.fix.graph.fake import Fake


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("sizes", [(), (3, 8)])
def test_sizes_share_graphs_and_outputs_are_cut(dim: int, sizes: tuple[int, ...]) -> None:
    weight = torch.randn(9)

    def fn(x: torch.Tensor, y: torch.Tensor, other: torch.Tensor) -> dict[str, Any]:
        return {"z": (x + y).relu(), "fixed": other * 2, "up": (x * 2).transpose(0, 1), "weight": weight}

    fake = Fake()
    g = graph(fn, backend=fake, buckets={"dim": dim, "sizes": sizes})
    other = torch.randn(9)
    rng = torch.Generator().manual_seed(0)
    for _ in range(40):
        n = int(torch.randint(1, 9, (), generator=rng))
        shape = [5, 5]
        shape[dim] = n
        x, y = torch.randn(shape), torch.randn(shape)
        got, want = g(x, y, other), fn(x, y, other)
        assert all(torch.equal(got[key], want[key]) for key in want), n
        x.fill_(torch.nan)
    assert fake.captures == (2 if sizes else 4)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=5, max_size=25))
def test_no_row_of_an_earlier_call_is_left(sizes: list[int]) -> None:
    """Rows do not meet here, but a sum over the padded ones would show what they hold: they must be zeros."""
    fake = Fake()
    g = graph(lambda x: (x * 2, x.ne(0).sum()), backend=fake, buckets=[4, 20], warmup=1)
    for n in [3, *sizes, 20, 20, 20, 5]:
        x = torch.rand(n, 2) + 1
        twice, filled = g(x)
        assert torch.equal(twice, x * 2) and filled == 2 * n


def test_more_than_the_largest_size_runs_as_it_is() -> None:
    fake = Fake()
    g = graph(lambda x: x * 2, backend=fake, buckets=[4])
    for _ in range(5):
        assert torch.equal(g(torch.ones(6)), torch.full((6,), 2.0))
    assert g.report().graphs[0].call == "6 float32"


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: x - x.mean(0), "depends on the rows that padding adds"),
        (lambda x: x.softmax(0), "depends on the rows"),
        (lambda x: torch.cat([x, x]), "for size"),
        (lambda x: x.add_(1), "writes into an argument"),
    ],
)
def test_rows_that_meet_are_refused(fn: Any, reason: str) -> None:
    g = graph(fn, backend=Fake(), buckets=True)
    with pytest.warns(UserWarning, match=reason):
        for n in (3, 4, 3):
            x = torch.randn(n, 2)
            want = fn(x.clone())
            got = g(x)
            assert torch.equal(got, want)


def test_parse() -> None:
    assert graph_bucket.parse(None) is None
    assert graph_bucket.parse(True) == graph_bucket.Buckets()
    assert graph_bucket.parse([8, 2]) == graph_bucket.Buckets(sizes=(2, 8))
    assert graph_bucket.parse({"dim": -1}) == graph_bucket.Buckets(dim=-1)
