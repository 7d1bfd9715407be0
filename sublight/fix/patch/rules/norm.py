"""LayerNorm and RMSNorm over the last dimension, whoever wrote the module: a weight, maybe a bias, no children.

What it adds under the root is read off its answer for a row so small that nothing else counts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F

from sublight.backend import private
from sublight.fix.patch import probe
from sublight.fix.patch.proof import Formula, prove, quiet, scaled
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.trace import trace
from sublight.fix.patch.twin import NotCopied, answer, first, is_cast, own, random, twin_of
from sublight.ops.norm.layer_norm import layer_norm
from sublight.ops.norm.rms_norm import rms_norm

ROWS = 4  # each a hundredth of the one before
NO_EPS = 1e-20
WIDTH = 32  # of the input for a module without a weight, which does not tell
OTHERS = (torch.nn.GroupNorm, private.NormBase, torch.nn.LocalResponseNorm)

TINY = (1e-8, 1e-12, 1e-16)  # whose squares a forward in float32 can hold
LEAST = (1e-8, 1e-10)  # without eps, a gradient's root to the third, too
NUMBERS = 512  # of a probe at each scale, at least
BUDGET = {
    **{"native_layer_norm": 1, "_fused_rms_norm": 1, "pow": 2, "mean": 2, "var": 1, "var_mean": 1, "sub": 2},
    **{"add": 3, "add_": 1, "rsqrt": 1, "sqrt": 1, "reciprocal": 1, "div": 1, "mul": 3, "linalg_vector_norm": 1},
}

Kind = Literal["LayerNorm", "RMSNorm", "RMSNorm with 1 + weight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    kind: Kind
    weight: str = ""  # the parameter's name
    bias: str = ""
    eps: float | None = None  # None: PyTorch's, of the data type that it computes in
    dtypes: frozenset[torch.dtype] = frozenset()  # in which it is proven
    ranks: frozenset[int] = field(default=frozenset(range(1, 6)), compare=False)  # of inputs, likewise
    keeps_order: bool = field(default=False, compare=False)  # in memory, of its input: written op by op

    def takes(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether this call is one that was proven; others have rules of promotion and broadcasting of their own."""
        return (
            x.dtype == weight.dtype
            and x.shape[-1:] == weight.shape
            and x.dtype in self.dtypes
            and x.dim() in self.ranks
            and not is_cast(x)
            and not is_rounded(self, x)
            and (not self.keeps_order or probe.lies_in_order(x) or probe.order_in_memory(x)[-1] == x.dim() - 1)
        )


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    kind = known(module, probe.dtype_of(module, model))
    return _swap(kind) if isinstance(kind, Norm) else kind


def known(module: torch.nn.Module, runs_in: torch.dtype | None = None) -> Norm | Left | None:
    """Which norm it is, with its parameters' names and its eps."""
    names = [name for name, p in module._parameters.items() if p is not None]
    if module._modules or module._buffers or len(names) > 2 or isinstance(module, OTHERS):
        return None
    shapes = {tuple(module.get_parameter(name).shape) for name in names}
    dims = {len(shape) for shape in shapes}
    if len(getattr(module, "normalized_shape", ())) > 1:
        return Left(rule="norm", reason="over several dimensions: our kernels take the last one")
    if dims - {1} or len(shapes) > 1 or 0 in (size := shapes.pop() if shapes else (_width(module),)):
        return None
    if size == (1,):
        return Left(rule="norm", reason="one weight for all columns") if _looks_like_one(module) else None
    try:
        twin = twin_of(module)
    except NotCopied as why:
        return Left(rule="norm", reason=f"not tried: {why}") if _looks_like_one(module) else None
    x = probe.sample(ROWS, 2, *size)
    result, reason = answer(twin, x)
    norm = _recognised(twin, names, x, result) if isinstance(result, torch.Tensor) else None
    if norm is None:
        reason = reason or "values not proven: neither LayerNorm nor RMSNorm with its parameters"
        return Left(rule="norm", reason=reason) if names and _looks_like_one(module) else None
    if not norm.weight:
        return Left(rule="norm", reason=f"{norm.kind} without a weight: our kernels have one")
    if is_rounded(norm, module.get_parameter(norm.weight)):
        return Left(rule="norm", reason="its own adds 1 to the weight in float32, ours would in 16 bits")
    x = random(max(4, NUMBERS // size[0]), *size)
    x = torch.cat((scaled(x), torch.stack([x * scale for scale in _near(_eps_for(norm, x))])))
    formula = _formula_of(norm, divides=_takes_a_root(twin, x))
    proof = prove(twin, formula, x, runs_in or probe.dtype_of(module, module))
    if proof.missing:
        return Left(rule="norm", reason=proof.missing)
    turned, _ = answer(twin, x.transpose(0, 1).contiguous().transpose(0, 1))
    return replace(norm, dtypes=proof.dtypes, ranks=proof.ranks, keeps_order=not turned.is_contiguous())


def _near(eps: float) -> tuple[float, ...]:
    """Scales at which eps decides: where it is added shows there alone."""
    root = math.sqrt(eps)
    return (*TINY, 0.1 * root, root, 10 * root, 0.0) if eps else LEAST


def _looks_like_one(module: torch.nn.Module) -> bool:
    return any("norm" in each.__name__.lower() for each in type(module).__mro__)


def _takes_a_root(twin: Any, x: torch.Tensor) -> bool:
    """Whether it divides by a root, whose rounding is another than that of the root's reciprocal."""
    with contextlib.suppress(Exception), torch.no_grad(), quiet():  # whatever a stranger's forward may raise
        return "sqrt" in trace(type(twin).forward, twin, x.clone()).ops
    return False


def _formula_of(norm: Norm, divides: bool = False) -> Formula:
    def by_hand(twin: Any, x: torch.Tensor) -> torch.Tensor:
        weight, bias = _columns(norm, twin)
        centred = x - x.mean(-1, keepdim=True) if norm.kind == "LayerNorm" else x
        square = centred.pow(2).mean(-1, keepdim=True) + _eps_for(norm, x)
        y = centred / torch.sqrt(square) if divides else centred * torch.rsqrt(square)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    parameters = tuple(name for name in (norm.weight, norm.bias) if name)
    return Formula(
        name=norm.kind, budget=BUDGET, compute=partial(_formula, norm), by_hand=by_hand, parameters=parameters
    )


def is_rounded(norm: Norm, x: torch.Tensor) -> bool:
    """Whether 1 + weight loses digits on its way to our kernel: up to 2.5 times PyTorch's own error in bf16."""
    return norm.kind == "RMSNorm with 1 + weight" and x.element_size() == 2


def _width(module: Any) -> int:
    sizes = getattr(module, "normalized_shape", (WIDTH,))
    return sizes[0] if sizes and isinstance(sizes[0], int) else WIDTH


def _recognised(twin: Any, names: list[str], x: torch.Tensor, result: torch.Tensor) -> Norm | None:
    if result.shape != x.shape or not result.is_floating_point():
        return None
    for norm in _candidates(names):
        eps = _eps(norm, twin, x, result)
        if eps is None:
            continue
        found = Norm(kind=norm.kind, weight=norm.weight, bias=norm.bias, eps=None if eps < 0 else eps)
        expected = _formula(found, twin, x)
        if all(probe.same(one, other) for one, other in zip(result, expected, strict=True)):
            return found
    return None


def _candidates(names: list[str]) -> Iterator[Norm]:
    if len(names) == 2:
        yield Norm(kind="LayerNorm", weight=names[0], bias=names[1])
        yield Norm(kind="LayerNorm", weight=names[1], bias=names[0])
        return
    weight = names[0] if names else ""
    yield Norm(kind="LayerNorm", weight=weight)
    yield Norm(kind="RMSNorm", weight=weight)
    if weight:
        yield Norm(kind="RMSNorm with 1 + weight", weight=weight)


def _eps(norm: Norm, twin: Any, x: torch.Tensor, result: torch.Tensor) -> float | None:
    """What the smallest row tells of eps, if this is the norm; below 0 for PyTorch's own choice."""
    weight, bias = _columns(norm, twin)
    smallest, unit = x[-1], result[-1].double()
    if bias is not None:
        unit = unit - bias
    if weight is not None:
        unit = unit / weight
    centred = smallest - smallest.mean(-1, keepdim=True) if norm.kind == "LayerNorm" else smallest
    eps = float(((centred / unit).square() - centred.square().mean(-1, keepdim=True)).median())
    if not math.isfinite(eps) or eps < -NO_EPS:
        return None
    if math.isclose(eps, torch.finfo(torch.float64).eps, rel_tol=1e-3):
        return -1.0  # which it would not be for other data types
    if eps < NO_EPS:
        return 0.0
    numbers = [value for value in vars(twin).values() if isinstance(value, float)]
    exact = (value for value in numbers if math.isclose(value, eps, rel_tol=1e-3))
    return next(exact, float(f"{eps:.3g}"))


def _columns(norm: Norm, module: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    weight: Any = getattr(module, norm.weight) if norm.weight else None
    if norm.kind == "RMSNorm with 1 + weight":
        weight = 1 + weight
    return weight, getattr(module, norm.bias) if norm.bias else None


def _formula(norm: Norm, twin: Any, x: torch.Tensor) -> torch.Tensor:
    weight, bias = _columns(norm, twin)
    if norm.kind == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, _eps_for(norm, x))
    return F.rms_norm(x, x.shape[-1:], weight, _eps_for(norm, x))


def _eps_for(norm: Norm, x: torch.Tensor) -> float:
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if norm.eps is None else norm.eps


def _computed(norm: Norm, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if norm.kind == "LayerNorm":
        return layer_norm(x, weight, torch.zeros_like(weight) if bias is None else bias, _eps_for(norm, x))
    return rms_norm(x, weight, _eps_for(norm, x))


def _swap(norm: Norm) -> Swap:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
            return own(self, *args, **kwargs)
        (x,) = args
        weight, bias = _columns(norm, self)
        if weight is None or not norm.takes(x, weight):
            return own(self, x)
        if norm.keeps_order and not probe.lies_in_order(x):
            order = probe.order_in_memory(x)
            return _computed(norm, x.permute(order), weight, bias).permute(*map(order.index, range(x.dim())))
        return _computed(norm, x, weight, bias)

    def arguments(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        weight = getattr(module, norm.weight)
        return (first(args, kwargs), weight, weight) if norm.kind == "LayerNorm" else (first(args, kwargs), weight)

    op = "layer_norm" if norm.kind == "LayerNorm" else "rms_norm"
    return Swap(rule="norm", op=op, forward=forward, arguments=arguments, what=norm.kind)


NORM = Rule(name="norm", find=find)
