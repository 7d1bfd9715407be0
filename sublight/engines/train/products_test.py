"""Products with their epilogues: the gradients are autograd's of the plain composition, whatever cuBLASLt offers."""

from __future__ import annotations

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
    if epilogue == Epilogue.GELU_BIAS:
        assert aux is not None and bias is not None
        return F.gelu(aux.copy_(out + bias), approximate="tanh")
    if epilogue == Epilogue.GELU_GRADIENT:
        assert aux is not None and bias is not None
        out = torch.ops.aten.gelu_backward(out, aux, approximate="tanh")
        bias.copy_(out.sum(0))
    if epilogue == Epilogue.LEFT_SUMS:
        assert bias is not None
        bias.copy_(a.sum(1))
    return out


@pytest.fixture(params=["all epilogues", "no epilogue"])
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLASLt here: with all its kernels, or with none for these sizes."""
    monkeypatch.setattr(cublaslt, "why_not", lambda a, b: "")
    monkeypatch.setattr(cublaslt, "product", emulated if request.param == "all epilogues" else lambda *a, **b: None)


def inputs(dtype: torch.dtype, device: str, scale: int = 1) -> dict[str, torch.Tensor]:
    generator = generator_for(device, 7)
    dim = DIM * scale
    shapes = {"x": (*ROWS, dim), "qkv": (3 * dim, dim), "qkv_b": (3 * dim,), "out": (dim, dim), "out_b": (dim,)}
    shapes |= {"up": (4 * dim, dim), "up_b": (4 * dim,), "down": (dim, 4 * dim), "down_b": (dim,)}
    return {
        name: (torch.randn(shape, generator=generator, device=device) * (1.0 if len(shape) != 2 else dim**-0.5))
        .to(dtype)
        .requires_grad_()
        for name, shape in shapes.items()
    }


def gradients(by: layers.Layers, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of the three functions in a row, with an output each."""
    x = given["x"]
    q, k, v = by.heads_of(x, given["qkv"], given["qkv_b"], HEADS)
    mixed = (q * k + v * 2).transpose(1, 2).reshape(x.shape)
    y = by.mlp(
        by.linear(mixed, given["out"], given["out_b"]), (given["up"], given["up_b"]), (given["down"], given["down_b"])
    )
    weights = torch.arange(y.shape[-1], device=y.device, dtype=y.dtype) / y.shape[-1] + 0.5
    return [y, *torch.autograd.grad((y * weights).sum(), list(given.values()))]


def test_gradients_are_those_of_the_plain_composition(on_cpu: None) -> None:
    given = inputs(torch.float64, "cpu")
    for name, ours, theirs in zip(
        ("y", *given), gradients(layers.OURS, given), gradients(layers.TORCH, given), strict=True
    ):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12, msg=name)


def test_without_cublaslt_it_is_the_plain_composition() -> None:
    given = inputs(torch.float32, "cpu")
    assert cublaslt.why_not(products.rows_of(given["x"]), given["up"].T) == "cuBLASLt is for NVIDIA GPUs"
    assert torch.equal(
        products.linear(given["x"], given["out"], given["out_b"]), F.linear(given["x"], given["out"], given["out_b"])
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cublaslts_epilogues_are_as_right_as_pytorch(dtype: torch.dtype) -> None:
    given = inputs(dtype, "cuda", scale=4)
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    assert products._why_not(given["x"], given["up"]) == ""
    ours, theirs, truth = (
        gradients(by, each) for by, each in ((layers.OURS, given), (layers.TORCH, given), (layers.TORCH, exact))
    )
    for name, *three in zip(("y", *given), ours, theirs, truth, strict=True):
        error = correct.error(name, *three)
        assert error.ok, error
