"""Products with their epilogues: the gradients are autograd's of the plain composition, whatever cuBLASLt offers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
import torch
import torch.nn.functional as F

from sublight import correct
from sublight.backend import cublaslt
from sublight.backend.cublaslt import Epilogue
from sublight.engines.train import layers, products
from sublight.ops.kernels.rows import generator_for

ROWS, DIM, HEADS = (3, 40), 16, 2


def emulated(
    a: torch.Tensor,
    b: torch.Tensor,
    epilogue: Epilogue = Epilogue.NONE,
    *,
    bias: torch.Tensor | None = None,
    aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """What cuBLASLt does, by PyTorch."""
    out = a @ b
    if bias is not None:
        out += bias
    if epilogue == Epilogue.GELU_BIAS:
        assert aux is not None
        return F.gelu(aux.copy_(out), approximate="tanh")
    if epilogue == Epilogue.GELU_GRADIENT:
        assert aux is not None
        return torch.ops.aten.gelu_backward(out, aux, approximate="tanh")
    return out


NOT_WORTH_IT: dict[str, tuple[Epilogue, ...]] = {
    "all epilogues": (),
    "gelu alone": (Epilogue.GELU_GRADIENT,),
    "gelu's gradient alone": (Epilogue.GELU_BIAS, Epilogue.BIAS),
    "none": tuple(Epilogue),
}


@pytest.fixture(params=NOT_WORTH_IT)
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt here, with such kernels as a timing has found worth it."""
    without = NOT_WORTH_IT[request.param]

    def product(a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue = Epilogue.NONE, **rest: Any) -> Any:
        return None if epilogue in without else emulated(a, b, epilogue, **rest)

    monkeypatch.setattr(cublaslt, "why_not", lambda a, b: "")
    monkeypatch.setattr(cublaslt, "product", product)
    monkeypatch.setattr(products, "_sum_over_rows", lambda x: x.sum(0))  # a CPU's product adds up in one long chain


def inputs(dtype: torch.dtype, device: str, seed: int, scale: int = 1) -> dict[str, torch.Tensor]:
    generator = generator_for(device, seed)
    dim = DIM * scale
    shapes = {"x": (*ROWS, dim), "qkv": (3 * dim, dim), "qkv_b": (3 * dim,), "out": (dim, dim), "out_b": (dim,)}
    shapes |= {"up": (4 * dim, dim), "up_b": (4 * dim,), "down": (dim, 4 * dim), "down_b": (dim,)}
    return {
        name: (torch.randn(shape, generator=generator, device=device) * (1.0 if len(shape) != 2 else dim**-0.5))
        .to(dtype)
        .requires_grad_()
        for name, shape in shapes.items()
    }


def test_what_is_not_kept_is_computed_again(on_cpu: None) -> None:
    given = inputs(torch.float32, "cpu", 0)
    kept, again = (gradients(by, given) for by in (layers.OURS, layers.FRUGAL))
    assert all(torch.equal(one, other) for one, other in zip(kept, again, strict=True))


def gradients(by: layers.Layers, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of the three functions in a row, with an output each."""
    x = given["x"]
    q, k, v = by.heads_of(x, given["qkv"], given["qkv_b"], HEADS)
    mixed = (q * k + v * 2).transpose(1, 2).reshape(x.shape)
    y = by.mlp(
        by.linear(mixed, given["out"], given["out_b"]), (given["up"], given["up_b"]), (given["down"], given["down_b"])
    )
    weights = torch.arange(y.shape[-1], device=y.device, dtype=y.dtype) / y.shape[-1] + 0.5
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), list(given.values()))]


def test_gradients_are_as_right_as_those_of_the_plain_composition(on_cpu: None) -> None:
    check(torch.float32, "cpu")


def check(dtype: torch.dtype, device: str, scale: int = 1) -> None:
    def draw(seed: int) -> list[correct.Error]:
        given = inputs(dtype, device, seed, scale)
        exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
        ours, theirs, truth = (
            gradients(by, each) for by, each in ((layers.OURS, given), (layers.TORCH, given), (layers.TORCH, exact))
        )
        return [correct.error(name, *three) for name, *three in zip(("y", *given), ours, theirs, truth, strict=True)]

    error = correct.settled(draw)
    assert error.ok, error


def test_without_cublaslt_it_is_the_plain_composition() -> None:
    given = inputs(torch.float32, "cpu", 0)
    assert cublaslt.why_not(products.rows_of(given["x"]), given["up"].T) == "cuBLASLt is for NVIDIA GPUs"
    assert torch.equal(
        products.linear(given["x"], given["out"], given["out_b"]), F.linear(given["x"], given["out"], given["out_b"])
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tuned_products_are_as_right_as_pytorchs(dtype: torch.dtype) -> None:
    given = inputs(dtype, "cuda", 0, scale=4)
    assert products._why_not(given["x"], given["up"]) == ""
    found = products.tune(ROWS[0] * ROWS[1], given["x"].shape[-1], 512, dtype, torch.device("cuda"))
    assert len(found) == 17 and all("why" not in row for row in found), found
    check(dtype, "cuda", scale=4)


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", list(Epilogue))
def test_every_kernel_that_may_be_chosen_is_right(epilogue: Epilogue) -> None:
    a, b, bias, aux = (
        torch.randn(shape, device="cuda").to(torch.bfloat16) for shape in ((256, 64), (64, 128), (128,), (256, 128))
    )
    given: dict[str, Any] = {"bias": bias} if epilogue in cublaslt.WITH_BIAS else {}
    given |= {"aux": aux} if epilogue in cublaslt.WITH_AUX else {}
    wanted = emulated(a.double(), b.double(), epilogue, **{name: x.double() for name, x in given.items()})
    theirs = emulated(a, b, epilogue, **{name: x.clone() for name, x in given.items()})

    def slow(result: torch.Tensor) -> Any:
        def call() -> torch.Tensor:
            torch.cuda._sleep(10**7)
            return result

        return call

    refused = cublaslt.tune(a, b, epilogue, **given, rival=slow(theirs + 1))
    assert refused["choice"] is None and "something else" in refused["why"]
    assert cublaslt.tune(a, b, epilogue, **given, rival=slow(theirs))["choice"] is not None
    kind = cublaslt.kind_of(a, b, epilogue, given.get("bias"), given.get("aux"))
    assert kind is not None
    known, _ = cublaslt._chosen()[kind]
    for choice in range(known.count):
        cublaslt._chosen()[kind] = known, choice
        ours = cublaslt.product(a, b, epilogue, **given)
        assert ours is not None
        error = correct.error(f"{epilogue.name} {choice}", ours, theirs, wanted)
        assert error.ok, error


def test_a_wrong_kernel_is_seen_at_either_end() -> None:
    right = torch.randn(3000, 8, generator=torch.Generator().manual_seed(3))
    assert cublaslt._is_alike(right.bfloat16(), right)
    for row in (0, 2999):
        wrong = right.clone()
        wrong[row] = 30.0
        assert not cublaslt._is_alike(wrong, right)
