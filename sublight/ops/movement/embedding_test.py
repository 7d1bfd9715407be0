"""What the record's shapes do not reach: frequent tokens, padding, ids that are no row, layouts, repetition."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import torch.nn.functional as F

from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.cost.movement import distinct
from sublight.errors import BadInput
from sublight.ops.movement import embedding
from sublight.ops.movement.embedding import EMBEDDING, launch
from sublight.ops.movement.embedding_gradient import RUN, launch_backward, plan_backward

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")


def backward_error(ids: torch.Tensor, cols: int, vocab: int, dtype: torch.dtype) -> correct.Error:
    generator = torch.Generator(device=ids.device).manual_seed(0)
    weight = torch.zeros(vocab, cols, device=ids.device, dtype=dtype)
    dy = torch.randn(*ids.shape, cols, generator=generator, device=ids.device, dtype=dtype)
    ours = lambda dy, ids, weight: (launch_backward(dy, ids, vocab),)  # noqa: E731
    return correct.worst(correct.backward_errors(ours, F.embedding, (ids, weight), dy))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, RUN - 1, RUN, RUN + 1, 2 * RUN - 1, 5 * RUN, 5 * RUN + 3])
@pytest.mark.parametrize("before", [0, 1, RUN - 1, RUN])
def test_a_frequent_token(count: int, before: int, dtype: str, device: str) -> None:
    """Its positions begin and end at, before and after a run's boundary; other tokens stand before and behind."""
    ids = torch.cat([torch.zeros(before), torch.full((count,), 2), torch.arange(5)]).long().to(device)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0)).to(device)]
    error = backward_error(ids, 40, 6, getattr(torch, dtype))
    assert error.ok, error


@pytest.mark.parametrize("cols", [40, 129, 5000])
def test_every_position_has_the_same_token(cols: int, device: str) -> None:
    error = backward_error(torch.full((3 * RUN + 1,), 1, device=device), cols, 3, torch.float32)
    assert error.ok, error


def test_padding_gets_no_gradient(device: str) -> None:
    ids = torch.tensor([3, 0, 3, 1, 3], device=device)
    dy = torch.randn(5, 16, device=device)
    weight = torch.randn(5, 16, device=device, requires_grad=True)
    embedding.embedding(ids, weight, -2).backward(dy)
    for padding, ours in ((3, launch_backward(dy, ids, 5, 3)), (0, launch_backward(dy, ids, 5, 0)), (3, weight.grad)):
        theirs, truth = (torch.ops.aten.embedding_dense_backward(x, ids, 5, padding, False) for x in (dy, dy.double()))
        assert correct.error("gradient", ours, theirs, truth).ok
        assert not ours[padding].any()
    for wrong in (5, -6):
        with pytest.raises(BadInput, match="padding_idx"):
            embedding.embedding(ids, weight, wrong)


def test_an_id_that_is_no_row_gives_nan_and_no_gradient(device: str) -> None:
    room = torch.randn(9, 24, device=device)
    ids = torch.tensor([0, 5, -1, 4, 2**31 + 1, 2**40, -(2**40)], device=device)
    y = launch(ids, room[2:7])
    known = torch.tensor([True, False, False, True, False, False, False], device=device)
    assert torch.equal(y[known], room[2:7][ids[known]])
    assert torch.isnan(y[~known]).all()
    dw = launch_backward(torch.ones(7, 24, device=device), ids, 5)
    assert dw.sum(1).tolist() == [24, 0, 0, 0, 24]


@pytest.mark.parametrize("cols", [40, 512, 1536, 4096])
@pytest.mark.parametrize("stream", [False, True])
def test_a_program_has_one_row_or_several(
    cols: int, stream: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "STREAMED_BYTES", 0 if stream else 2**40)
    weight = torch.randn(9, cols, device=device)
    ids = torch.arange(700 if cols == 40 else 7, device=device) % 9
    (step,) = EMBEDDING.plan(ids, weight).steps
    assert (step.constants["STREAM"], step.constants["ONE_ROW"]) == (stream, cols > 40)
    assert torch.equal(launch(ids, weight), weight[ids])


def test_each_way_to_share_out_rows_is_reached() -> None:
    tiles = {vectors: embedding.tile_of(vectors).block for vectors in (512, 640, 96, 1)}
    assert tiles == {512: 256, 640: 128, 96: 256, 1: 256}


def test_few_positions_have_no_runs(device: str) -> None:
    names = {}
    for rows in (RUN - 1, RUN):
        ids, dy = torch.zeros(rows, dtype=torch.int64, device=device), torch.zeros(rows, 24, device=device)
        names[rows] = [step.name for step in plan_backward(dy, ids, 5, -1).steps]
    assert names[RUN] == ["_keys_kernel", "_ends_kernel", "_runs_kernel", "_rows_kernel"]
    assert names[RUN - 1] == ["_keys_kernel", "_ends_kernel", "_rows_kernel"]


def test_a_second_derivative_leaves_out_what_is_no_row(device: str) -> None:
    ids = torch.tensor([[3, -1, 2], [7, 3, 0]], device=device)  # -1 and 7 are no rows, 2 is padding
    weight = torch.randn(5, 8, device=device, requires_grad=True)
    dy = torch.randn(2, 3, 8, device=device, requires_grad=True)
    (dw,) = torch.autograd.grad(embedding.embedding(ids, weight, 2), weight, dy, create_graph=True)
    assert torch.equal(dw, launch_backward(dy.detach(), ids, 5, 2))  # sums of two: the same in any order
    (counted,) = torch.autograd.grad(dw.sum(), dy)
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]], device=device)
    assert torch.equal(counted, expected.unsqueeze(-1).expand(dy.shape))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("size", [(), (1,), (2, 3, 4)])
def test_ids_of_any_shape(kind: torch.dtype, size: tuple[int, ...], device: str) -> None:
    ids = torch.randint(0, 11, size, device=device).to(kind)
    weight = torch.randn(11, 20, device=device)
    assert torch.equal(launch(ids, weight), F.embedding(ids, weight))
    dy = torch.randn(*size, 20, device=device)
    theirs, truth = (torch.ops.aten.embedding_dense_backward(x, ids, 11, -1, False) for x in (dy, dy.double()))
    assert correct.error("gradient", launch_backward(dy, ids, 11), theirs, truth).ok
    apart = ids.mT if ids.dim() > 1 else ids
    assert torch.equal(launch(apart, weight), F.embedding(apart, weight))


@pytest.mark.parametrize(
    ("cols", "stride", "start", "vector"),
    [(64, 64, 0, 4), (64, 66, 0, 2), (66, 68, 0, 2), (64, 64, 1, 1), (65, 68, 0, 1), (64, 64, 2, 2)],
)
def test_a_load_is_as_wide_as_the_table_allows(cols: int, stride: int, start: int, vector: int, device: str) -> None:
    room = torch.randn(10 * stride + start, device=device)
    weight = room.as_strided((10, cols), (stride, 1), start)
    assert embedding.vector_of(weight) == vector
    ids = torch.arange(9, -1, -1, device=device)
    assert torch.equal(launch(ids, weight), weight.flip(0))


def test_nothing_to_look_up(device: str) -> None:
    weight = torch.randn(4, 8, device=device, requires_grad=True)
    y = embedding.embedding(torch.zeros(0, 3, dtype=torch.int64, device=device), weight)
    assert y.shape == (0, 3, 8)
    assert torch.equal(launch_backward(y, torch.zeros(0, 3, dtype=torch.int64, device=device), 4), weight * 0)


def test_wrong_input_goes_to_pytorch_which_says_what_is_wrong(device: str) -> None:
    ids, weight = torch.zeros(3, dtype=torch.int64, device=device), torch.randn(4, 8, device=device)
    for wrong in ((ids.float(), weight), (ids, weight[0])):
        assert EMBEDDING.plan(*wrong).provider == "torch"
        with pytest.raises(RuntimeError):
            embedding.embedding(*wrong)
    assert EMBEDDING.plan(ids, weight.double()).provider == "torch"


def test_a_strange_gradient_stays_in_its_row(device: str) -> None:
    ids = torch.tensor([1, 2, 2, 4], device=device)
    dy = torch.ones(4, 8, device=device)
    dy[1] = math.nan
    dy[3, 2] = math.inf
    dw = launch_backward(dy, ids, 5)
    assert torch.isnan(dw[2]).all()
    assert torch.isfinite(dw[[0, 1, 3]]).all()
    assert torch.isinf(dw[4]).sum() == 1


def test_the_expected_number_of_different_ids() -> None:
    """Within four standard deviations of a mean of twenty: a false alarm in 16,000 choices of the seeds."""
    rows, vocab, draws = 4096, 1000, 20
    shape = {"rows": rows, "cols": 1, "vocab": vocab}
    found = [len(EMBEDDING.inputs(shape, "float32", "cpu", seed)[0].unique()) for seed in range(draws)]
    shares = (math.log((token + 2) / (token + 1)) / math.log(vocab + 1) for token in range(vocab))
    missing = [(1 - share) ** rows for share in shares]
    variance = sum(each * (1 - each) for each in missing)  # at most: that one id is drawn makes others rarer
    assert abs(sum(found) / draws - distinct(rows, vocab)) < 4 * math.sqrt(variance / draws) + 0.5  # rounded
    assert distinct(1, 1000) == 1


@pytest.mark.gpu
def test_the_gradient_repeats_bit_for_bit() -> None:
    shape = {"rows": 30_000, "cols": 1024, "vocab": 5000}
    ids = EMBEDDING.inputs(shape, "bfloat16", "cuda", 0)[0]
    dy = torch.randn(30_000, 1024, device="cuda", dtype=torch.bfloat16)
    first = launch_backward(dy, ids, 5000)
    for _ in range(5):
        assert torch.equal(first, launch_backward(dy, ids, 5000))


@pytest.mark.gpu
@pytest.mark.gpu_large
@pytest.mark.gpu_seconds(2)
def test_past_two_to_the_thirty_one_elements() -> None:
    rows, cols = 2**20 + 3, 2056
    ids = torch.arange(rows, device="cuda") % 7
    weight = torch.randn(7, cols, device="cuda", dtype=torch.bfloat16)
    y = launch(ids, weight)
    assert torch.equal(y[-9:], weight[ids[-9:]])
    dw = launch_backward(y, ids.flip(0), 7)
    assert torch.isfinite(dw).all()
    table = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([rows - 1, 0, rows - 2], device="cuda")
    assert torch.equal(launch(ids, table), table[ids])
    dw = launch_backward(y[:3], ids, rows)
    assert torch.equal(dw[-1], y[0])
    assert torch.equal(dw[-2], y[2])
