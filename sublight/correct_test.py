"""The checker is tested on wrong answers: each must be refused, and PyTorch's own must pass."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from sublight import correct
from sublight.correct import Error, Inputs, backward_errors, error, forward_errors, gradients, settled, worst
from sublight.op import Op
from sublight.ops import find

ROWS, COLS = 64, 257
DTYPES = ("float32", "float16")
Spoil = Callable[[torch.Tensor], torch.Tensor]


def returns_zeros(y: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(y)


def skips_last_row(y: torch.Tensor) -> torch.Tensor:
    return torch.cat((y[:-1], torch.zeros_like(y[-1:])))


def is_one_column_off(y: torch.Tensor) -> torch.Tensor:
    return y.roll(1, -1)


def is_a_thousandth_too_large(y: torch.Tensor) -> torch.Tensor:
    return (y.double() * (1 + 1e-3)).to(y.dtype)


def has_one_nan(y: torch.Tensor) -> torch.Tensor:
    return y.index_put((torch.tensor(ROWS // 2), torch.tensor(7)), torch.tensor(math.nan, dtype=y.dtype))


def has_one_infinity(y: torch.Tensor) -> torch.Tensor:
    return y.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(math.inf, dtype=y.dtype))


def has_one_wrong_element(y: torch.Tensor) -> torch.Tensor:
    return y.index_put((torch.tensor(ROWS - 1), torch.tensor(COLS - 1)), y[-1, -1] * 1.25)


WRONG = (
    returns_zeros,
    skips_last_row,
    is_one_column_off,
    is_a_thousandth_too_large,
    has_one_nan,
    has_one_infinity,
    has_one_wrong_element,
)


def spoiled(op: Op, spoil: Spoil) -> Callable[..., torch.Tensor]:
    return lambda *inputs: spoil(op.reference(*inputs))


def inputs_of(op: Op, dtype: str, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    count = 2 if op.name == "add" else 1
    return tuple(torch.randn(ROWS, COLS, generator=generator, dtype=getattr(torch, dtype)) for _ in range(count))


CASES = [pytest.param(find(name), dtype, id=f"{name}-{dtype}") for name in ("softmax", "add") for dtype in DTYPES]


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_pytorch_itself_passes(op: Op, dtype: str) -> None:
    (found,) = forward_errors(op.reference, op.reference, inputs_of(op, dtype))
    assert found.ok
    assert found.ratio == 1
    assert found.torch_largest > 0, "else the test below would be one of exactness"
    assert found.count == ROWS * COLS


@pytest.mark.parametrize("spoil", WRONG, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_a_wrong_answer_is_refused(op: Op, dtype: str, spoil: Spoil) -> None:
    (found,) = forward_errors(spoiled(op, spoil), op.reference, inputs_of(op, dtype))
    assert not found.ok, found


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_a_wrong_data_type_or_shape_is_no_answer(op: Op, dtype: str) -> None:
    inputs = inputs_of(op, dtype)
    with pytest.raises(ValueError, match=r"output 0: torch\.float64 \(64, 257\), not torch\.float"):
        forward_errors(spoiled(op, lambda y: y.double()), op.reference, inputs)
    with pytest.raises(ValueError, match=r"\(63, 257\), not .* \(64, 257\)"):
        forward_errors(spoiled(op, lambda y: y[:-1]), op.reference, inputs)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        forward_errors(lambda *x: (op.reference(*x),) * 2, op.reference, inputs)


def test_twice_the_error_of_pytorch_passes_and_no_more() -> None:
    op = find("add")
    inputs = inputs_of(op, "float16")
    truth = op.reference(*(x.double() for x in inputs))
    theirs = truth.half()

    def off_by(factor: float) -> torch.Tensor:
        """In float64, so that the error is exactly that many times PyTorch's."""
        return truth + factor * (theirs.double() - truth)

    assert error("x", off_by(1.99), theirs.double(), truth).ok
    assert not error("x", off_by(2.01), theirs.double(), truth).ok
    assert error("x", off_by(2.01), theirs.double(), truth).ratio == pytest.approx(2.01)


def test_many_small_errors_count_as_one_large_one_does() -> None:
    """The largest error is PyTorch's own, but every element has it: only the root mean square tells."""
    truth = torch.zeros(1000, dtype=torch.float64)
    theirs = truth.clone()
    theirs[0] = 1e-3
    found = error("x", torch.full_like(truth, 1e-3), theirs, truth)
    assert found.largest == found.torch_largest
    assert found.ratio == pytest.approx(math.sqrt(1000))


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_pytorch_is_exact_every_bit_counts(dtype: str) -> None:
    op, kind = find("add"), getattr(torch, dtype)
    whole = torch.arange(ROWS, dtype=kind)
    (same,) = forward_errors(op.call, op.reference, (whole, whole))
    assert (same.ratio, same.ok, same.torch_largest) == (0.0, True, 0.0)

    def last_bit(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = x + y
        return torch.cat((z[:-1], torch.nextafter(z[-1:], torch.tensor([math.inf], dtype=z.dtype))))

    (found,) = forward_errors(last_bit, op.reference, (whole, whole))
    assert (found.ratio, found.ok, found.misplaced) == (math.inf, False, 0)


SPECIAL = torch.tensor([1.0, math.inf, -math.inf, math.nan, 0.0])


@pytest.mark.parametrize(
    ("place", "value"), [(0, math.nan), (0, math.inf), (1, 1.0), (1, -math.inf), (1, math.nan), (2, math.inf),
                         (2, -3.0e38), (3, 0.0), (3, math.inf), (4, -math.inf)],
)  # fmt: skip
def test_what_is_not_finite_must_be_where_it_belongs(place: int, value: float) -> None:
    theirs, truth = SPECIAL.clone(), SPECIAL.double()
    assert error("x", SPECIAL.clone(), theirs, truth).ratio == 0
    ours = SPECIAL.clone()
    ours[place] = value
    found = error("x", ours, theirs, truth)
    assert (found.misplaced, found.ratio) == (1, math.inf)


def test_what_overflows_in_the_data_type_must_overflow() -> None:
    op = find("add")
    x = torch.full((3,), 60000.0, dtype=torch.float16)
    assert worst(forward_errors(op.reference, op.reference, (x, x))).ok
    (found,) = forward_errors(lambda x, y: (x + y).clamp(max=65504), op.reference, (x, x))
    assert found.misplaced == 3


def test_nothing_has_no_error() -> None:
    empty = torch.empty(0, 5)
    assert error("x", empty, empty, empty.double()).ratio == 0


# ------------------------------------------------------------------------------------------------ gradients


def scaled(op: Op, *factors: float) -> Callable[..., Inputs]:
    """PyTorch's gradients, each times its factor."""
    return lambda grad, *inputs: tuple(
        (factor * g.double()).to(g.dtype)
        for factor, g in zip(factors, gradients(op.reference, inputs, grad), strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorchs_gradients_pass(dtype: str) -> None:
    op = find("rms_norm")
    inputs = op.inputs({"rows": ROWS, "cols": COLS}, dtype, "cpu", 0)
    found = backward_errors(scaled(op, 1.0, 1.0), op.reference, inputs, torch.randn_like(inputs[0]))
    assert [(each.name, each.ratio) for each in found] == [("gradient 0", 1.0), ("gradient 1", 1.0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [0.0, -1.0, 1.01, 2.0, math.nan])
@pytest.mark.parametrize("which", [0, 1])
def test_one_wrong_gradient_is_found(which: int, factor: float, dtype: str) -> None:
    op = find("rms_norm")
    inputs = op.inputs({"rows": ROWS, "cols": COLS}, dtype, "cpu", 0)
    factors = [1.0, 1.0]
    factors[which] = factor
    found = backward_errors(scaled(op, *factors), op.reference, inputs, torch.randn_like(inputs[0]))
    assert [each.ok for each in found] == [which == 1, which == 0]
    assert worst(found).name == f"gradient {which}"


def test_a_gradient_that_is_not_given_is_no_answer() -> None:
    op = find("rms_norm")
    inputs = op.inputs({"rows": 4, "cols": 8}, "float32", "cpu", 0)
    with pytest.raises(ValueError, match="argument 2 is longer"):
        backward_errors(lambda grad, *x: gradients(op.reference, x, grad)[:1], op.reference, inputs, inputs[0])


def test_gradients_are_those_of_each_input_in_turn() -> None:
    x, y, grad = (torch.randn(3, 4) for _ in range(3))
    found = gradients(lambda x, y: x * y.sin(), (x, y), grad)
    torch.testing.assert_close(found, (grad * y.sin(), grad * x * y.cos()))
    assert not x.requires_grad and x.grad is None, "the caller's tensors stay as they were"
    leaf = torch.randn(3, 4, requires_grad=True)
    gradients(find("softmax").reference, (leaf,), grad)
    assert leaf.grad is None


# ------------------------------------------------------------------------------------------------ several draws


def drawn(largest: float, torch_largest: float, *, misplaced: int = 0) -> Error:
    return Error(
        name="output 0",
        largest=largest,
        squares=4 * largest**2,
        count=4,
        torch_largest=torch_largest,
        torch_squares=4 * torch_largest**2,
        misplaced=misplaced,
    )


def test_draws_are_pooled() -> None:
    pooled = drawn(3.0, 1.0).merge(drawn(1.0, 2.0))
    assert pooled == Error(
        name="output 0", largest=3.0, squares=40.0, count=8, torch_largest=2.0, torch_squares=20.0, misplaced=0
    )
    assert not drawn(3.0, 1.0).ok and pooled.ok, "one draw's luck is not an error"
    assert pooled.ratio == pytest.approx(1.5)


@pytest.mark.parametrize(("largest", "ok", "seeds"), [((3.0, 1.0, 1.0, 1.0), True, 2), ((3.0,) * 8, False, 8)])
def test_more_draws_end_luck_and_leave_an_error(largest: tuple[float, ...], ok: bool, seeds: int) -> None:
    asked: list[int] = []

    def draw(seed: int) -> list[Error]:
        asked.append(seed)
        return [drawn(0.5, 1.0), drawn(largest[seed], 1.0 + (seed == 1 and ok))]

    assert settled(draw).ok == ok
    assert asked == list(range(seeds))


def test_what_is_right_at_once_is_drawn_once() -> None:
    asked: list[int] = []
    assert settled(lambda seed: [asked.append(seed) or drawn(1.0, 1.0)], 3).ok  # type: ignore[func-returns-value]
    assert asked == [0, 1, 2]


def test_luck_does_not_hide_what_is_misplaced() -> None:
    assert drawn(0.0, 1.0).merge(drawn(0.0, 1.0, misplaced=1)).ratio == math.inf


def test_worst_is_the_largest_ratio_not_the_largest_error() -> None:
    large, worse = drawn(10.0, 10.0), drawn(3.0, 1.0)
    assert worst([large, worse]) is worse
    assert correct.FACTOR == 2
