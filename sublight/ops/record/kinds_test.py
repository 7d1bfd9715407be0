"""Arguments of the wrong kind get one line, whoever meets them first; what is right stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import sublight
from sublight.errors import BadInput
from sublight.ops import OPS, find
from sublight.ops.record import kinds

NOT_TENSORS: tuple[Any, ...] = (None, [1.0], "x")
WRONG: tuple[tuple[Callable[..., Any], str], ...] = (
    (lambda x, w: sublight.layer_norm(x, w, w, eps="a"), "layer_norm takes a number for eps, not 'a'"),
    (lambda x, w: sublight.layer_norm(x, w, w, eps=None), "layer_norm takes a number for eps, not None"),
    (lambda x, w: sublight.matmul(x, x.T, bias=1.0), "matmul takes a torch.Tensor for bias, not 1.0"),
    (lambda x, w: sublight.softmax_topk(x, k=1.5), "softmax_topk takes a whole number for k, not 1.5"),
    (
        lambda x, w: sublight.cross_entropy(x, torch.zeros_like(x[:, 0]).long(), ignore_index=1.5),
        "cross_entropy takes a whole number for ignore_index, not 1.5",
    ),
)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "embedding", "swiglu", "gelu", "bias_gelu"])
@pytest.mark.parametrize("wrong", NOT_TENSORS, ids=repr)
def test_what_is_no_tensor_is_named(name: str, wrong: Any) -> None:
    op = next(op for op in OPS if op.name == name)
    _, *others = op.inputs(op.test_shapes[0], next(iter(op.dtypes)), "cpu", 0)
    with pytest.raises(BadInput, match=f"^{name} takes a torch.Tensor for "):
        op.call(wrong, *others)


@pytest.mark.parametrize(("call", "line"), WRONG, ids=lambda each: each if isinstance(each, str) else "")
def test_what_is_no_number_is_named(call: Callable[..., Any], line: str, device: str) -> None:
    with pytest.raises(BadInput) as refused:
        call(torch.randn(3, 100, device=device), torch.ones(100, device=device))
    assert str(refused.value) == line


def test_python_and_pytorch_keep_their_own_words() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nope'"):
        sublight.softmax(torch.ones(2, 3), nope=1)
    with pytest.raises(RuntimeError, match="must match the size") as refused:
        sublight.add(torch.ones(2), torch.ones(3))
    assert not isinstance(refused.value, BadInput)


def test_tensors_of_one_launch_are_on_one_device(device: str) -> None:
    there, here = torch.ones(2, device="meta"), torch.ones(2)
    kinds.check_devices("add", {"x": "Tensor", "y": "Tensor", "n": "int"}, (here, here, 3))
    with pytest.raises(BadInput, match="add: y is on meta, x on cpu: they must be on one device"):
        kinds.check_devices("add", {"x": "Tensor", "y": "Tensor"}, (here, there))
    codes = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
    scale = torch.ones((), device=device)
    with pytest.raises(BadInput, match=f"scaled_matmul: b is on meta, a on {device}"):
        sublight.scaled_matmul(codes, codes.to("meta"), scale, scale)


NAN = float("nan")
ODD = [
    (name, option, value)
    for name, options in (
        ("attention", {"window": True, "softcap": NAN, "scale": NAN}),
        ("packed_attention", {"window": True, "softcap": NAN, "scale": NAN}),
        ("paged_attention", {"window": True, "softcap": NAN, "scale": NAN}),
        ("paged_prefill", {"window": True, "softcap": NAN, "scale": NAN}),
        ("mla_decode", {"scale": float("inf")}),
        ("cascade", {"scale": NAN}),
        ("sample", {"temperature": NAN}),
    )
    for option, value in options.items()
]


@pytest.mark.parametrize(("name", "option", "value"), ODD)
def test_a_number_that_makes_no_sense_is_refused(name: str, option: str, value: Any, device: str) -> None:
    inputs = find(name).inputs(find(name).test_shapes[0], "float32", device, 0)
    with pytest.raises(BadInput, match=f"{option}.*: (use|give)"):
        getattr(sublight, name)(*inputs, **{option: value})
    if name == "sample":
        with pytest.raises(BadInput, match="seed is float: give a whole number"):
            sublight.sample(inputs[0], 1.5)


def test_a_data_type_is_a_number_to_a_schema() -> None:
    kinds.check("kv_gather", {"dtype": "Optional[int]"}, (torch.float16,))
    with pytest.raises(BadInput, match="kv_gather takes a whole number for dtype, not 'half'"):
        kinds.check("kv_gather", {"dtype": "Optional[int]"}, ("half",))
