"""C = A @ B, with what often follows: bias, activation, residual, while the tile is still in registers.

The ladder, each step a provider: `naive` and `coalesced` (`ladder.py`) read the operands from memory for every row;
`tiled` brings them through shared memory, `tensor_core` multiplies by tensor cores, `swizzled` takes the tiles in an
order that the L2 likes (all three `tensor_core.py`); `persistent` keeps one program on each multiprocessor, and lets
Hopper's copy engine load (`persistent.py`); `split_k` cuts the tiles of the last round into pieces along k
(`split_k.py`). A linear layer's weight is (n, k): its product is `matmul(x, weight.T)`, and nothing is moved for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from sublight.backend.device import facts
from sublight.backend.state import PLAIN, constant_when_compiled
from sublight.correct import Inputs
from sublight.cost import Shape
from sublight.cost.matmul import matmul as cost
from sublight.errors import BadInput
from sublight.op import Op, Plan, Provider
from sublight.ops.gated.gated import swiglu
from sublight.ops.kernels.rows import generator_for, why_no_kernel
from sublight.ops.matmul import ladder, persistent, skinny, split_k, tensor_core
from sublight.ops.matmul.choice import why_cublas
from sublight.ops.matmul.epilogue import ACTIVATIONS, check_activation
from sublight.ops.matmul.product import operands_of, product_of
from sublight.ops.matmul.steps import LADDER as LADDER  # low_bit_matmul.py takes it and Work from here
from sublight.ops.matmul.steps import Work as Work
from sublight.ops.matmul.steps import plan_by, why_not_skinny
from sublight.ops.record.autocast import under_autocast
from sublight.ops.record.call import SMALL_BYTES
from sublight.ops.record.gradient import Gradient
from sublight.ops.record.library import Registered

Maybe = torch.Tensor | None
SWIGLU = "swiglu"


def reference(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: Maybe = None,
    residual: Maybe = None,
    activation: str = "none",
    tf32: bool = False,
) -> torch.Tensor:
    """PyTorch's composition, with what cuBLAS adds in the same pass; `tf32` it reads from its own switch."""
    is_layer = bias is not None and b.dim() == 2 and tuple(bias.shape) == (b.shape[1],) and bias.dtype == a.dtype
    y = F.linear(a, b.T, bias) if is_layer else a @ b
    if bias is not None and not is_layer:
        y = y + bias
    y = ACTIVATIONS[activation](y)
    return y if residual is None else y + residual  # type: ignore[no-any-return]


def why_not_ours(a: torch.Tensor, b: torch.Tensor, bias: Maybe, residual: Maybe, activation: str, tf32: bool) -> str:
    """Why no kernel of ours can take a product; empty where one can, whether or not it is faster."""
    if reason := why_no_kernel(a):
        return reason
    if a.dim() < 2 or b.dim() < 2 or a.shape[-1] != b.shape[-2]:
        return "PyTorch multiplies vectors, and says what is wrong with shapes"
    if b.dim() > 2 and a.shape[:-2] != b.shape[:-2]:
        return "batches that differ: PyTorch broadcasts"
    if a.numel() == 0 or b.numel() == 0:
        return "nothing to multiply"
    others = [x for x in (b, bias, residual) if x is not None]
    if any(x.dtype != a.dtype or x.device != a.device for x in others):
        return "the arguments differ in data type or device"
    if bias is not None and tuple(bias.shape) != (b.shape[-1],):
        return "PyTorch broadcasts a bias that is no row"
    if residual is not None and tuple(residual.shape) != (*a.shape[:-1], b.shape[-1]):
        return "PyTorch broadcasts a residual of another shape"
    if activation != "none" and torch.is_grad_enabled() and any(x.requires_grad for x in (a, *others)):
        return "an activation's gradient needs what it was taken of, which our kernel does not keep"
    return ""


def why_torch(a: torch.Tensor, b: torch.Tensor, bias: Maybe, residual: Maybe, activation: str, tf32: bool) -> str:
    """Why a product goes to PyTorch (cuBLAS); empty where a kernel of ours takes it."""
    if reason := why_not_ours(a, b, bias, residual, activation, tf32):
        return reason
    if not a.is_cuda:
        return ""  # interpreted, or planned for a GPU that is not here
    if torch.compiler.is_compiling() or any(type(x) not in PLAIN for x in (a, b)):  # a traced gradient's, for one
        return "cuBLAS: a traced tensor has no address, which the choice depends on"
    product = product_of(a, b)
    if product is None:
        return "cuBLAS: the leading dimensions would have to be copied"
    return why_cublas(product, operands_of(product, a, b), a.dtype, facts(a))


def plan_product(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> Plan:
    # not `split_k`, whose last form no GPU has run yet
    return plan_by("persistent" if why_not_skinny(a, b) else "skinny", a, b, *rest)


def fake(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def backward(
    dc: torch.Tensor, a: torch.Tensor, b: torch.Tensor, tf32: bool, wanted: tuple[bool, ...], is_invariant: bool = False
) -> tuple[Maybe, ...]:
    """The gradients of a, b, bias, residual, of those that are wanted: two products, each by its own plan."""
    of_rows = _invariant if is_invariant else _matmul  # of b, the batch is what is summed over
    wants_a, wants_b, wants_bias, wants_residual = wanted
    rows = dc.reshape(-1, dc.shape[-1])
    da = of_rows.call(dc, b.mT, None, None, "none", tf32) if wants_a else None
    db = None
    if wants_b and b.dim() == 2:
        db = _matmul.call(a.reshape(-1, a.shape[-1]).T, rows, None, None, "none", tf32)
    elif wants_b:
        db = _matmul.call(a.mT, dc, None, None, "none", tf32)
    return da, db, rows.sum(0) if wants_bias else None, dc if wants_residual else None


def _by_torch(saved: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same in PyTorch's ops, to be differentiated again."""
    (dc,), a, b = grads, saved["a"], saved["b"]
    rows = dc.reshape(-1, dc.shape[-1])
    db = a.reshape(-1, a.shape[-1]).T @ rows if b.dim() == 2 else a.mT @ dc
    return dc @ b.mT, db, rows.sum(0), dc


def _registered(
    name: str, why_torch: Callable[..., str], plan: Callable[..., Plan], backward: Any, *, is_ours: bool = False
) -> Registered:
    """`is_ours`: a call that our kernel can take is its, whatever the host's time: PyTorch's bits are others."""
    return Registered(
        schema=f"{name}(Tensor a, Tensor b, Tensor? bias, Tensor? residual, str activation, bool tf32) -> Tensor c",
        reference=reference,
        theirs="torch.matmul",
        why_torch=why_torch,
        plan=plan,
        fake=fake,
        theirs_bytes=(lambda *args: int(SMALL_BYTES)) if is_ours else None,
        gradient=Gradient(
            by=SimpleNamespace(call=backward),
            saves=("a", "b"),
            options=("tf32",),
            gives=("a", "b", "bias", "residual"),
            by_torch=_by_torch,
            is_masked=True,
        ),
    )


_matmul = _registered("matmul", why_torch, plan_product, backward)
_invariant = _registered(
    "matmul_invariant", why_not_ours, partial(plan_by, "invariant"), partial(backward, is_invariant=True), is_ours=True
)
_atomic = _registered("matmul_atomic", why_not_ours, partial(plan_by, "atomic"), backward, is_ours=True)


def matmul(
    a: torch.Tensor, b: torch.Tensor, bias: Maybe = None, residual: Maybe = None, *, activation: str = "none",
    batch_invariant: bool = False, deterministic: bool = True,
) -> torch.Tensor:  # fmt: skip
    """activation(a @ b + bias) + residual; a linear layer is `matmul(x, weight.T, bias)`.

    fp32 is rounded to tf32 where PyTorch is told to (`torch.set_float32_matmul_precision("high")`). With
    `batch_invariant` a row's result, and its gradient, are the same bits whatever other rows there are, which cuBLAS
    does not promise: the call is then always our kernel's, and an error where there is none.
    `activation="swiglu"` takes the first half of b's columns as gate, the second as up: silu(gate) * up is half as
    wide, and follows the product in a launch of its own. Under autocast a, b and bias are in its data type.
    A call has the same bits from run to run. `deterministic=False` allows other ones: up to 64 rows are then multiplied
    by our kernel, and where programs share k they add their parts to the sums as they come.
    """
    check_activation(activation, SWIGLU)
    a, b, bias = under_autocast(a, b, bias)
    if activation == SWIGLU:
        if b.shape[-1] % 2:
            raise BadInput(f"swiglu halves the columns of a product, and b has {b.shape[-1]}")
        y = swiglu(matmul(a, b, bias, batch_invariant=batch_invariant, deterministic=deterministic))
        return y if residual is None else y + residual
    if batch_invariant:
        given = (a, b, bias, residual, activation, allows_tf32(a))
        if not deterministic:
            raise BadInput("batch_invariant=True and deterministic=False exclude each other")
        if a.numel() and b.numel() and (reason := why_not_ours(*given)):
            raise BadInput(f"batch_invariant=True needs our kernel, which does not take this product: {reason}")
        return _invariant.call(*given)  # type: ignore[no-any-return]
    of = _matmul if deterministic or not _has_few_rows(a, b) else _atomic
    return of.call(a, b, bias, residual, activation, allows_tf32(a))  # type: ignore[no-any-return]


def _has_few_rows(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() >= 2 and b.dim() == 2 and 0 < a.shape[:-1].numel() <= skinny.MOST_ROWS


@constant_when_compiled
def _precision() -> str:
    return torch.get_float32_matmul_precision()


def allows_tf32(a: torch.Tensor) -> bool:
    return a.dtype == torch.float32 and _precision() != "highest"


def arguments(
    a: torch.Tensor, b: torch.Tensor, bias: Maybe = None, residual: Maybe = None, activation: str = "none"
) -> Any:
    """What the registered op takes."""
    return a, b, bias, residual, activation, allows_tf32(a)


def plan(
    a: torch.Tensor, b: torch.Tensor, bias: Maybe = None, residual: Maybe = None, activation: str = "none"
) -> Plan:
    if activation != SWIGLU:
        return _matmul.decide(*arguments(a, b, bias, residual, activation))
    product = _matmul.decide(*arguments(a, b, bias))
    return replace(product, reason=f"{product.reason}; swiglu follows in a launch of its own")


def launched_by(provider: str) -> Callable[..., torch.Tensor]:
    """The product by one step of the ladder, whether or not it wins."""

    def launch(*args: Any) -> torch.Tensor:
        given = arguments(*args)
        return _matmul.runner(plan_by(provider, *given))(*given)  # type: ignore[no-any-return]

    return launch


def backward_by(provider: str) -> Callable[..., Inputs]:
    """Both gradients by one step of the ladder; B's has as many rows as k, which few rows have no use for."""
    launch, of_b = launched_by(provider), launched_by("persistent" if provider == "skinny" else provider)

    def launch_backward(dc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Inputs:
        return launch(dc, b.mT), of_b(a.mT, dc)

    return launch_backward


def inputs(shape: Shape, dtype: str, device: str, seed: int) -> Inputs:
    """As a linear layer has them: both lie along k."""
    generator = generator_for(device, seed)
    made = {"generator": generator, "device": device, "dtype": getattr(torch, dtype)}
    return torch.randn(shape["m"], shape["k"], **made), torch.randn(shape["n"], shape["k"], **made).T


KERNELS = {
    "naive": (ladder.NAIVE,),
    "coalesced": (ladder.COALESCED,),
    "tiled": (tensor_core.TILE,),
    "tensor_core": (tensor_core.TILE,),
    "swizzled": (tensor_core.TILE,),
    "skinny": (skinny.ROW, skinny.ROWS, skinny.ADD_PARTS),
    "persistent": (persistent.PERSISTENT, persistent.ALIGN, tensor_core.EVERY_TILE),
    "split_k": (*(split_k.SPLIT, split_k.ADD_PIECES, persistent.PERSISTENT, persistent.ALIGN, tensor_core.EVERY_TILE),),
}

MATMUL = Op(
    name="matmul",
    summary="A @ B, with bias, activation and residual",
    reference=reference,
    call=matmul,
    plan=plan,
    providers={
        name: Provider(
            launch=launched_by(name),
            backward=backward_by(name),
            kernels=KERNELS[name],
            why_not=why_not_skinny if name == "skinny" else lambda *inputs: "",
            summary=summary,
        )
        for name, (_, summary) in LADDER.items()
    },
    inputs=inputs,
    cost=cost,
    shapes=tuple({"m": m, "n": n, "k": k} for m, n, k in (
        (4096, 4096, 4096), (8192, 8192, 8192), (512, 14336, 4096), (4096, 14336, 4096), (4096, 4096, 14336),
        (8192, 28672, 8192), (4096, 100_000, 700), (8192, 50257, 768), (1, 4096, 4096), (16, 4096, 14336),
    )),
    test_shapes=tuple({"m": m, "n": n, "k": k} for m, n, k in (
        (1, 1, 1), (17, 15, 16), (16, 72, 63), (65, 64, 40), (130, 129, 72),
    )),
    batch="",
    library_args=arguments,
)  # fmt: skip
