"""linear_cross_entropy against the composition that holds all logits: values, gradients, chunks, memory."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.errors import BadInput
from sublight.ops.cross_entropy import launch as launches
from sublight.ops.cross_entropy import linear_cross_entropy as module
from sublight.ops.cross_entropy.launch import Options
from sublight.ops.cross_entropy.linear_cross_entropy import LINEAR_CROSS_ENTROPY, linear_cross_entropy, reference, run
from sublight.ops.cross_entropy.linear_plan import chunks_of

SHAPE = {"rows": 300, "cols": 24, "vocab": 70}
FEW = 128 * 70 * 4  # bytes of logits: 128 rows of them in fp32
OPTIONS = (
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0},
    {"ignore_index": 3, "reduction": "sum"},
    {"label_smoothing": 0.2, "reduction": "none"},
)
EACH_OPTION = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options)) or "plain")


def drawn(dtype: str, device: str, options: dict[str, Any]) -> tuple[Any, ...]:
    hidden, weight, labels = LINEAR_CROSS_ENTROPY.inputs(SHAPE, dtype, device, 0)
    return hidden, weight, labels.where(labels >= 0, options.get("ignore_index", -100))


def library(hidden: Any, weight: Any, labels: Any, chunk_bytes: int = FEW, **options: Any) -> Any:
    wants = (hidden.requires_grad, weight.requires_grad)
    given = (*Options(**options), chunk_bytes, *wants)
    return torch.ops.sublight.linear_cross_entropy(hidden, weight, labels, *given)[0]


@pytest.mark.parametrize(
    ("rows", "row_bytes", "chunk_bytes"),
    [(1, 8, 1), (128, 8, 1), (129, 8, 1), (8192, 256512, 2**28), (5000, 10, 10**9)],
)
def test_chunks_cover_the_rows_and_fit(rows: int, row_bytes: int, chunk_bytes: int) -> None:
    chunks = list(chunks_of(rows, row_bytes, chunk_bytes))
    assert [row for chunk in chunks for row in range(chunk.start, chunk.stop)] == list(range(rows))
    sizes = [chunk.stop - chunk.start for chunk in chunks]
    assert max(sizes) * row_bytes <= max(chunk_bytes, 128 * row_bytes)
    assert all(size % 128 == 0 for size in sizes[:-1])
    assert max(sizes) - min(sizes) <= 256


@pytest.mark.parametrize(
    ("rows", "features", "vocab", "chunks"),
    [(8192, 4096, 128256, 8), (8192, 2048, 151936, 8), (8192, 1600, 50257, 4), (4096, 4096, 32000, 1)],
)
def test_chunks_fill_whole_waves(rows: int, features: int, vocab: int, chunks: int) -> None:
    """11 steps of 128 rows by 16 of 256 features are 176 tiles: on 132 multiprocessors two waves, a third of them idle;
    eight steps are 128 tiles, one wave."""
    assert len(list(chunks_of(rows, 2 * vocab, module.CHUNK_BYTES, features=features))) == chunks


@EACH_OPTION
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_in_chunks_are_as_right_as_pytorch(options: dict[str, Any], dtype: str, device: str) -> None:
    inputs = drawn(dtype, device, options)
    assert len(list(chunks_of(SHAPE["rows"], 70 * inputs[0].element_size(), FEW // 2))) > 1

    def ours(dloss: Any, hidden: Any, weight: Any, labels: Any) -> Any:
        given = Options(**options)
        if given.reduction == "none":
            return run(hidden, weight, labels, given, FEW // 2, True, True, dloss=dloss)[1:3]
        _, dh, dw, count = run(hidden, weight, labels, given, FEW // 2, True, True)
        late = launches.is_late(hidden, given)
        launches.launch_scale(dh, dloss, count, late)
        launches.launch_scale(dw, dloss, count, late, 1.0 / module._alpha(hidden, given))
        return dh, dw

    def truth(*tensors: Any) -> Any:
        return reference(*tensors, **options)

    grads = correct.random_grads(truth, inputs)
    errors = correct.backward_errors(ours, truth, inputs, grads)
    assert correct.worst(errors).ok, errors
    losses = run(*inputs, Options(**options), FEW // 2, False, False)[0]
    exact = truth(*(x.double() if x.is_floating_point() else x for x in inputs))
    torch.testing.assert_close(losses.double(), exact, rtol=1e-5 if dtype == "float32" else 5e-3, atol=2e-3)


@EACH_OPTION
@pytest.mark.parametrize("frozen", ["neither", "hidden", "weight"])
def test_the_library_op_agrees_with_the_reference(options: dict[str, Any], frozen: str, device: str) -> None:
    hidden, weight, labels = drawn("float32", device, options)
    hidden = hidden.view(3, 100, -1)
    labels = labels.view(3, 100)
    if device == "cpu":
        hidden, weight = hidden.double(), weight.double()
    leaves = [(hidden.clone(), weight.clone()) for _ in range(2)]
    for h, w in leaves:
        h.requires_grad_(frozen != "hidden")
        w.requires_grad_(frozen != "weight")
    ours, theirs = library(*leaves[0], labels, **options), reference(*leaves[1], labels, **options)
    torch.testing.assert_close(ours, theirs)
    dloss = torch.randn_like(ours)
    for _ in range(2):  # a second backward pass gets gradients of its own
        ours.backward(dloss, retain_graph=True)
        theirs.backward(dloss, retain_graph=True)
    for one, other in zip(*leaves, strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("rows", [1024, 1 << 20])
def test_a_sum_kept_in_fp16_neither_overflows_nor_vanishes(rows: int) -> None:
    h = torch.empty(rows, 1, dtype=torch.float16, device="meta")
    assert 128 <= module._alpha(h, Options()) * rows <= 256
    assert module._alpha(h, Options(reduction="sum")) == 1.0
    assert module._alpha(h.float(), Options()) == 1.0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight": torch.zeros(9, 7)}, "do not fit"),
        ({"weight": torch.zeros(9)}, "do not fit"),
        ({"weight": torch.zeros(9, 8, dtype=torch.float64)}, "float64"),
        ({"labels": torch.zeros(4)}, "int64"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, "shape"),
        ({"label_smoothing": 2.0}, "label_smoothing"),
        ({"softcap": -3.0}, "softcap"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
    ],
)
def test_bad_input_is_refused_in_a_line(change: dict[str, Any], says: str, device: str) -> None:
    given = {"weight": torch.zeros(9, 8), "labels": torch.zeros(4, dtype=torch.int64), **change}
    tensors = (given.pop("weight").to(device), given.pop("labels").to(device))
    with pytest.raises(BadInput, match=says) as caught:
        linear_cross_entropy(torch.randn(4, 8, device=device), *tensors, **given)
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
def test_the_whole_logits_are_never_held() -> None:
    rows, cols, vocab = 4096, 2048, 128256  # a weight too large to be added up in fp32
    hidden, weight, labels = LINEAR_CROSS_ENTROPY.inputs(
        {"rows": rows, "cols": cols, "vocab": vocab}, "bfloat16", "cuda", 0
    )
    hidden.requires_grad_()
    weight.requires_grad_()
    linear_cross_entropy(hidden[:128], weight, labels[:128]).detach()  # cuBLAS keeps what it takes at its first call
    gc.collect()  # what other tests have left
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels).backward()
    outputs = 2 * (rows * cols + vocab * cols)
    beyond = torch.cuda.max_memory_allocated() - before - outputs
    assert beyond < 0.4 * 2**30, beyond
    assert beyond < 2 * rows * vocab / 2  # half of the logits


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_weights_gradient_is_as_right_as_pytorch_over_many_chunks(dtype: str) -> None:
    x = LINEAR_CROSS_ENTROPY.inputs({"rows": 4096, "cols": 320, "vocab": 32000}, dtype, "cuda", 0)
    grads = (torch.ones((), device="cuda", dtype=x[0].dtype),)

    def ours(dloss: Any, *leaves: Any, chunk_bytes: int) -> Any:
        return correct.gradients(lambda *t: linear_cross_entropy(*t, chunk_bytes=chunk_bytes), leaves, (dloss,))

    for chunk_bytes in (2**24, 2**25):  # 16 chunks are added up in fp32, eight in the weight's data type
        errors = correct.backward_errors(partial(ours, chunk_bytes=chunk_bytes), reference, x, grads)
        assert correct.worst(errors).ok, errors
    once, thrice = (ours(by * grads[0], *x, chunk_bytes=2**25) for by in (1, 3))
    for one, three in zip(once, thrice, strict=True):
        rounding = torch.finfo(one.dtype).eps * float(three.abs().max())  # two of half an ulp
        assert float((three.double() - 3 * one.double()).abs().max()) <= rounding
