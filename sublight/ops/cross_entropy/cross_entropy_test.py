"""Every option of cross_entropy, values and gradients, and what must not go wrong quietly."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from sublight import correct
from sublight.conftest import HAS_GPU
from sublight.errors import BadInput
from sublight.ops.cross_entropy import cross_entropy as module
from sublight.ops.cross_entropy import launch as launches
from sublight.ops.cross_entropy.cross_entropy import CROSS_ENTROPY, cross_entropy, reference
from sublight.ops.cross_entropy.launch import Options, kernel_for, run

DTYPES = ("float32", "float16", "bfloat16") if HAS_GPU else ("float32", "float16")
WIDTHS = {"tile": (40, 100), "row": (12, 2064), "trailing": (6, 4099)}  # of each kernel: rows, columns
KERNELS = pytest.mark.parametrize("kernel", WIDTHS)
OPTIONS = (
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"z_loss": 1e-2},
    {"softcap": 5.0},
    {"ignore_index": 3},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 20.0, "ignore_index": 1, "reduction": "none"},
)
_SHARED = (OPTIONS[3], OPTIONS[-1])  # what each kernel is asked; the rest is arithmetic that they have in common
EACH_OPTION = pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options)))


def drawn(kernel: str, dtype: str, device: str, seed: int = 0) -> tuple[Any, ...]:
    rows, cols = WIDTHS[kernel]
    x, labels = CROSS_ENTROPY.inputs({"rows": rows, "cols": cols}, dtype, device, seed)
    assert kernel_for(x, x, Options())[0] == kernel
    labels[1:4] = torch.tensor([1, 3, cols - 1])
    return x, labels.clamp(min=0) if seed % 2 else labels


def loss(options: dict[str, Any]) -> Any:
    return lambda x, labels: run(x, labels, Options(**options), gradient="no")[0]


def gradient(options: dict[str, Any], *, how: str = "new") -> Any:
    def call(dloss: Any, x: Any, labels: Any) -> tuple[Any]:
        _, d, count = run(x.clone() if how == "in place" else x, labels, Options(**options), gradient=how)
        launches.launch_scale(d, dloss, count, launches.is_late(x, Options(**options)))
        return (d,)

    return call


def pooled(errors: list[list[correct.Error]]) -> correct.Error:
    total = errors[0]
    for more in errors[1:]:
        total = [one.merge(other) for one, other in zip(total, more, strict=True)]
    return correct.worst(total)


@pytest.mark.parametrize(
    ("kernel", "options"),
    [(kernel, options) for kernel in WIDTHS for options in OPTIONS if kernel == "tile" or options in _SHARED],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_option_is_as_right_as_pytorch(options: dict[str, Any], kernel: str, dtype: str, device: str) -> None:
    def truth(x: Any, labels: Any) -> Any:
        return reference(x, labels.where(labels >= 0, options.get("ignore_index", -100)), **options)

    found: list[list[correct.Error]] = []
    slopes: list[list[correct.Error]] = []
    for seed in range(3):
        x, labels = drawn(kernel, dtype, device, seed)
        labels = labels.where(labels >= 0, options.get("ignore_index", -100))
        found.append(correct.forward_errors(loss(options), truth, (x, labels)))
        grads = correct.random_grads(truth, (x, labels), seed=seed)
        slopes.append(correct.backward_errors(gradient(options), truth, (x, labels), grads))
    assert pooled(found).ok, pooled(found)
    assert pooled(slopes).ok, pooled(slopes)


@KERNELS
def test_in_place_gives_the_same_gradient(kernel: str, device: str) -> None:
    x, labels = drawn(kernel, "float32", device)
    options = Options(label_smoothing=0.1)
    loss, d, _ = run(x, labels, options, gradient="new")
    over = x.clone()
    loss_over, d_over, _ = run(over, labels, options, gradient="in place")
    assert torch.equal(d, d_over) and torch.equal(loss, loss_over)
    assert d_over.data_ptr() == over.data_ptr()


@KERNELS
def test_in_place_touches_nothing_beside_the_rows(kernel: str, device: str) -> None:
    x, labels = drawn(kernel, "float32", device)
    rows, cols = x.shape
    over, apart = (x.new_full((rows, cols + 5), 7.0) for _ in range(2))  # rows of one layout: added up in one order
    over[:, :cols] = x
    options = Options(label_smoothing=0.1)
    losses, count = launches.new_losses(x, rows, options), launches.new_count(x, options)
    launches.launch_rows(over[:, :cols], labels, options, losses=losses, d=apart[:, :cols], count=count)
    run(over[:, :cols], labels, options, gradient="in place")
    assert torch.equal(over, apart) and bool((over[:, cols:] == 7.0).all())


def test_in_place_leaves_rows_that_share_memory_alone(device: str) -> None:
    row = torch.randn(1, 100, device=device)
    labels = torch.arange(5, device=device)
    kept = row.clone()
    _, d, _ = run(row.expand(5, 100), labels, Options(), gradient="in place")
    assert torch.equal(row, kept)
    assert torch.equal(d, run(row.repeat(5, 1), labels, Options(), gradient="new")[1])


@KERNELS
def test_ignored_rows_have_no_loss_and_no_gradient_whatever_they_hold(kernel: str, device: str) -> None:
    x, labels = drawn(kernel, "float32", device)
    labels[2] = labels[5] = -100
    x[2] = math.nan
    x[5, 7] = math.inf
    losses, d, _ = run(x, labels, Options(reduction="none"), gradient="new")
    for row in (2, 5):
        assert losses[row] == 0 and not d[row].any()
    total, mean_d, _ = run(x, labels, Options(), gradient="new")
    kept = labels != -100
    torch.testing.assert_close(total, reference(x[kept], labels[kept]))
    assert torch.isfinite(mean_d).all()


@KERNELS
def test_a_mean_over_no_label_is_nan_as_pytorch_has_it(kernel: str, device: str) -> None:
    for dtype in DTYPES:
        x, labels = drawn(kernel, dtype, device)
        labels.fill_(-100)
        total, d, count = run(x, labels, Options(), gradient="new")
        assert torch.isnan(total) and torch.isnan(reference(x, labels)) and not d.any()
        launches.launch_scale(d, torch.full_like(total, 2.0), count, launches.is_late(x, Options()))
        assert not d.any()
        assert run(x, labels, Options(reduction="sum"), gradient="no")[0] == 0


@KERNELS
@pytest.mark.parametrize("wrong", [-1, 2**40])
def test_a_label_that_is_no_class_gives_nan_in_its_row(kernel: str, wrong: int, device: str) -> None:
    x, labels = drawn(kernel, "float32", device)
    labels[4] = wrong
    losses, d, _ = run(x, labels, Options(reduction="none"), gradient="new")
    assert torch.isnan(losses[4]) and torch.isnan(d[4]).all()
    others = torch.arange(len(labels), device=device) != 4
    assert torch.isfinite(losses[others]).all() and torch.isfinite(d[others]).all()
    assert torch.isnan(run(x, labels, Options(reduction="none"), gradient="no")[0][4])


@KERNELS
def test_strange_values_stay_in_their_row(kernel: str, device: str) -> None:
    x, labels = drawn(kernel, "float32", device)
    labels.clamp_(min=0)
    for row, value in enumerate((math.nan, math.inf, -math.inf)):
        x[row, 9] = value
    x[3] = -math.inf
    x[4, int(labels[4])] = -math.inf
    truth = x.double().requires_grad_()
    expected = reference(truth, labels, reduction="none")
    expected.sum().backward()
    losses, d, _ = run(x, labels, Options(reduction="none"), gradient="new")
    assert torch.equal(torch.isnan(losses), torch.isnan(expected)) and losses[4] == math.inf
    assert torch.equal(torch.isfinite(d), torch.isfinite(truth.grad))


def test_a_gradient_of_one_costs_no_pass_and_another_scales(device: str) -> None:
    d = torch.randn(7, 5000, device=device)
    for dloss in (1.0, 0.5, 0.0):
        result = d.clone()
        launches.launch_scale(result, torch.tensor(dloss, device=device), torch.empty(0, device=device), False)
        assert torch.equal(result, d * dloss)
    each = torch.tensor([1.0, 2.0, 0.0, 1.0, -1.0, 3.0, 0.5], device=device)
    result = d.clone()
    launches.launch_scale(result, each, torch.empty(0, device=device), False)
    assert torch.equal(result, d * each[:, None])


@KERNELS
def test_another_gradient_than_one_costs_one_rounding(kernel: str, device: str) -> None:
    """The stored gradient is that of a loss whose own is one. Twice PyTorch's error is held to by ops_test; times
    another number it is rounded once more, and by a power of two not at all."""
    for dtype in DTYPES:
        x, labels = drawn(kernel, dtype, device)
        one, two, three = (
            module.launch_backward(torch.tensor(by, device=device, dtype=x.dtype), x, labels)[0] for by in (1, 2, 3)
        )
        if dtype != "float16":  # which is stored before it is divided by the count, and so rounded once for any
            assert torch.equal(three, (3 * one.double()).to(x.dtype)) and torch.equal(two, 2 * one)
        (error,) = correct.backward_errors(
            lambda *_, ours=three: (ours,), reference, (x, labels), (torch.tensor(3.0, device=device, dtype=x.dtype),)
        )
        rounding = torch.finfo(x.dtype).eps / 2 * float(three.abs().max())
        assert error.largest <= correct.FACTOR * error.torch_largest + rounding, error


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_all_its_label_has_no_loss(kernel: str, dtype: str, device: str) -> None:
    """As PyTorch has it, to the last bit: the sum of exponentials is exactly one."""
    x, labels = drawn(kernel, dtype, device, seed=1)
    for top in (0.0, 3.3, 17.77, -41.3):
        x.fill_(-math.inf)
        x.scatter_(1, labels[:, None], top)
        losses, d, _ = run(x, labels, Options(reduction="none"), gradient="new")
        assert not losses.any() and not d.any()


def test_a_loss_scale_saves_small_fp16_gradients(device: str) -> None:
    """With 1/rows in the stored gradient most of it would be zero before the scale could help."""
    x, labels = CROSS_ENTROPY.inputs({"rows": 1030, "cols": 64}, "float16", device, 0)
    scale = (torch.tensor(32768.0, device=device, dtype=torch.float16),)
    truth = correct.gradients(reference, (x.double(), labels), (scale[0].double(),))[0]
    (d,) = module.launch_backward(*scale, x, labels)
    assert ((d == 0) == (truth.half() == 0)).float().mean() > 0.99
    assert correct.worst(correct.backward_errors(module.launch_backward, reference, (x, labels), scale)).ok


def library(x: Any, labels: Any, *, with_gradient: bool = True, **options: Any) -> Any:
    return torch.ops.sublight.cross_entropy(x, labels, *Options(**options), with_gradient)[0]


@EACH_OPTION
def test_the_library_op_agrees_with_the_reference(options: dict[str, Any], device: str) -> None:
    x, labels = CROSS_ENTROPY.inputs({"rows": 40, "cols": 130}, "float32", device, 0)
    labels = labels.where(labels >= 0, options.get("ignore_index", -100))
    x = x.double() if device == "cpu" else x
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    y, expected = library(ours, labels, **options), reference(theirs, labels, **options)
    torch.testing.assert_close(y, expected)
    dloss = torch.randn_like(y)
    y.backward(dloss)
    expected.backward(dloss)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("with_gradient", [True, False])
def test_a_second_backward_pass_is_as_right_as_the_first(with_gradient: bool, device: str) -> None:
    x, labels = CROSS_ENTROPY.inputs({"rows": 6, "cols": 40}, "float32", device, 0)
    x.requires_grad_()
    scales_in_place = device == "cuda" and with_gradient
    y = cross_entropy(x, labels) if scales_in_place else library(x, labels, with_gradient=with_gradient)
    (first,) = torch.autograd.grad(y, x, torch.zeros_like(y), retain_graph=True)
    (second,) = torch.autograd.grad(y, x, torch.full_like(y, 3.0), retain_graph=True)
    (third,) = torch.autograd.grad(y, x, retain_graph=True)
    assert not first.any()
    torch.testing.assert_close(second, 3 * third)
    torch.testing.assert_close(third, correct.gradients(reference, (x, labels), (torch.ones_like(y),))[0])


def test_more_dimensions_and_one(device: str) -> None:
    x, labels = torch.randn(2, 3, 40, device=device), torch.arange(6, device=device).view(2, 3)
    losses = run(x, labels, Options(reduction="none"), gradient="no")[0]
    torch.testing.assert_close(losses, reference(x, labels, reduction="none"))
    assert losses.shape == (2, 3)
    torch.testing.assert_close(
        run(x[0, 0], labels[0, 0], Options(), gradient="no")[0], reference(x[0, 0], labels[0, 0])
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"labels": torch.zeros(4, dtype=torch.int32)}, "int64"),
        ({"labels": torch.zeros(4, 9)}, "int64"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, "shape"),
        ({"labels": torch.zeros(4, 1, dtype=torch.int64)}, "shape"),
        ({"label_smoothing": 1.5}, "label_smoothing"),
        ({"label_smoothing": -0.1}, "label_smoothing"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": math.nan}, "softcap"),
        ({"z_loss": -1.0}, "z_loss"),
        ({"reduction": "average"}, "reduction"),
    ],
)
def test_bad_input_is_refused_in_a_line(change: dict[str, Any], says: str, device: str) -> None:
    given = {"labels": torch.zeros(4, dtype=torch.int64), **change}
    labels = given.pop("labels").to(device)
    with pytest.raises(BadInput, match=says) as caught:
        cross_entropy(torch.randn(4, 9, device=device), labels, **given)
    assert "\n" not in str(caught.value)


def test_backward_alone_costs_nothing_and_both_directions_read_and_write_once() -> None:
    shape = {"rows": 10, "cols": 100}
    assert CROSS_ENTROPY.cost(shape, "bfloat16", "bwd").bytes == 0
    assert CROSS_ENTROPY.cost(shape, "bfloat16", "fwd+bwd").bytes == 2 * 2 * 1000 + 80 + 2


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_in_place_on_a_gpu(reduction: Any) -> None:
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4096, 64, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(4096, (300,), device="cuda")
    grads = []
    for in_place in (False, True):
        logits = hidden @ weight.T
        kept = logits.detach().clone()
        y = cross_entropy(logits, labels, reduction=reduction, in_place=in_place)
        y.sum().backward()
        grads.append(hidden.grad)
        hidden.grad = None
        assert torch.equal(logits, kept) != in_place
        if in_place:
            with pytest.raises(BadInput, match="second backward pass"):
                y.sum().backward()
    assert torch.equal(*grads)
    with pytest.raises(BadInput, match="leaf"):
        cross_entropy(torch.randn(4, 9, device="cuda", requires_grad=True), labels[:4], in_place=True)


@pytest.mark.gpu
def test_whoever_saved_the_logits_hears_that_they_are_gone() -> None:
    x = torch.randn(8, 4096, device="cuda", requires_grad=True)
    logits = x.exp()  # its backward pass needs them
    y = cross_entropy(logits, torch.arange(8, device="cuda"), in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.gpu
def test_the_loss_repeats_bit_for_bit() -> None:
    x, labels = CROSS_ENTROPY.inputs({"rows": 3000, "cols": 50257}, "bfloat16", "cuda", 0)
    first = run(x, labels, Options(), gradient="new")
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, run(x, labels, Options(), gradient="new"), strict=True))
