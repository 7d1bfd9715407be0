"""Feed-forward blocks: down(act(gate(x)) * up(x)), gate and up apart or halves of one projection; down(act(up(x))).

The projections and dropouts are still called as the modules they are, hooks, adapters, quantization and all; what is
fused is what lies between them. Which is which is found by trying: stand-ins of low rank take the projections' places.
Only the last projection of a gated block, in training and where it is a linear layer that nobody listens to, is made
part of the op: so its input, a third of what the block would hold for backward, is not held.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from sublight.backend.private import has_any_global_hook
from sublight.fix.patch import probe
from sublight.fix.patch.proof import Formula, Proof, prove, scaled
from sublight.fix.patch.record import Left, Rule, Swap
from sublight.fix.patch.rules.activation import BUDGETS, BY_HAND, FORMULAS, Elementwise
from sublight.fix.patch.trace import trace
from sublight.fix.patch.twin import (
    Line,
    NotCopied,
    Shift,
    answer,
    first,
    is_autocast,
    is_hooked,
    is_leaf,
    is_pytorchs,
    own,
    random,
    twin_of,
)
from sublight.ops.gated.gated import Gate
from sublight.ops.gated.gated_linear import gated, gated_linear, holds_product
from sublight.ops.pointwise.activation import gelu, relu2

MOST_CHILDREN = 8
TOKENS = 32  # an error in few elements must meet some
LEAST = 8  # the least width of a stand-in
GATED_OPS = {"silu": "swiglu", "gelu_tanh": "geglu", "gelu": "geglu"}
GATES: dict[str, Gate] = {"silu": "silu", "gelu_tanh": "tanh", "gelu": "none"}
PLAIN_OPS = {"gelu_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A feed-forward block in its children's names."""

    layout: Literal["apart", "gate first", "gate last", "plain"]  # of gate and up; plain: there is no gate
    act: str
    gate: str  # or both halves; of a plain block, the only projection before the activation
    up: str = ""
    down: str
    inner: str = ""  # dropout before the last projection
    outer: str = ""  # and after it
    skipped: tuple[str, ...] = ()  # children that are not called any more
    up_first: bool = False  # it is called before gate: both may draw random numbers


def find(module: torch.nn.Module, model: torch.nn.Module) -> Swap | Left | None:
    children = dict(module.named_children())
    widths = {name: width for name, child in children.items() if (width := _width(child))}
    drops = [name for name, child in children.items() if isinstance(child, torch.nn.Dropout)]
    skipped = tuple(name for name, child in children.items() if name not in widths and name not in drops)
    if len(widths) not in (2, 3) or len(children) > MOST_CHILDREN or any(p is not None for p in _own_tensors(module)):
        return None
    if any(not is_leaf(children[name]) for name in skipped):
        return None
    plans = [
        plan
        for plan in _plans(widths, drops, skipped)
        if plan.layout != "plain" or not skipped  # the activation is a module: its own rule swaps it
    ]
    runs_in = probe.dtype_of(module, model)
    found: Swap | Left | None = None
    for small in dict.fromkeys((_smaller(widths), 1)):  # its forward may know the true widths
        if plans and isinstance(found := _tried(module, widths, drops, plans, small, runs_in), Swap):
            break
    return found


def _smaller(widths: dict[str, tuple[int, int]]) -> int:
    """By how much all widths can be divided, so that stand-ins cost nothing."""
    divisor = 1
    while all(
        size % (2 * divisor) == 0 and size // (2 * divisor) >= LEAST for pair in widths.values() for size in pair
    ):
        divisor *= 2
    return divisor


def _tried(
    module: torch.nn.Module,
    widths: dict[str, tuple[int, int]],
    drops: list[str],
    plans: list[Plan],
    divisor: int,
    runs_in: torch.dtype,
) -> Swap | Left | None:
    widths = {name: (wide // divisor, out // divisor) for name, (wide, out) in widths.items()}
    stand_ins: dict[str, torch.nn.Module] = {
        name: Line(*width, seed=probe.SEED + 10 * i, name=name) for i, (name, width) in enumerate(widths.items())
    }
    stand_ins |= {name: Shift(0.5 + 0.3 * i, name=name) for i, name in enumerate(drops)}
    try:
        twin, reason = twin_of(module, stand_ins), ""
    except NotCopied as why:
        return Left(rule="mlp", reason=f"not tried: {why}")
    for width in dict.fromkeys(widths[plan.gate][0] for plan in plans):  # it may go from narrow to wide, or back
        x = probe.sample(1, TOKENS, width)
        result, reason = answer(twin, x)
        if not isinstance(result, torch.Tensor):
            continue
        tried = {plan: _far(_run(twin, plan, x), result) for plan in plans if widths[plan.gate][0] == width}
        best = min(tried, key=lambda plan: tried[plan])  # not the first: the two gelus are near each other
        if probe.same(result, _run(twin, best, x)):
            hooked = [name for name in best.skipped if is_hooked(module.get_submodule(name))]
            if hooked:
                return Left(rule="mlp", reason=f"{hooked[0]} has a hook, which would not be called")
            proof = prove(twin, _formula(best), scaled(random(TOKENS, width)), runs_in)
            if proof.missing:
                return Left(rule="mlp", reason=proof.missing)
            return _swap(replace(best, up_first=_is_up_first(twin, best, x)), proof)
    has_act = plans[0].skipped or any(callable(value) for value in vars(module).values())
    if not has_act or all(plan.layout == "plain" for plan in plans):
        return None  # projections alone: attention, maybe
    return Left(
        rule="mlp", reason=reason or "values not proven: no product of an activation (silu, gelu) and a projection"
    )


def _is_up_first(twin: Any, plan: Plan, x: torch.Tensor) -> bool:
    calls = trace(type(twin).forward, twin, x).ops
    return plan.layout == "apart" and calls.index(f"call {plan.up}") < calls.index(f"call {plan.gate}")


def _formula(plan: Plan) -> Formula:
    """Between stand-ins, the activation and the product; each projection is called once, and the dropouts."""
    budget = dict(BUDGETS[plan.act])
    if plan.layout != "plain":
        budget["mul"] = budget.get("mul", 0) + 1
    names = [name for name in (plan.gate, plan.up, plan.down, plan.inner, plan.outer) if name]
    budget |= {f"call {name}": names.count(name) for name in names}

    def compute(act: Elementwise, twin: Any, x: torch.Tensor) -> torch.Tensor:
        gate = getattr(twin, plan.gate)(x)
        up = getattr(twin, plan.up)(x) if plan.layout == "apart" else None
        if plan.layout == "gate first":
            gate, up = gate.chunk(2, -1)
        elif plan.layout == "gate last":
            up, gate = gate.chunk(2, -1)
        h = act(gate) if up is None else act(gate) * up
        return _finish(twin, plan, h)  # type: ignore[no-any-return]

    name = f"{plan.act} and a product" if plan.layout != "plain" else plan.act
    return Formula(
        name=name,
        budget=budget,
        compute=partial(compute, FORMULAS[plan.act]),
        by_hand=partial(compute, BY_HAND[plan.act]),
    )


def _width(child: Any) -> tuple[int, int] | None:
    """Of a projection, in and out: nn.Linear, what wraps or quantizes one, GPT-2's Conv1D."""
    for names in (("in_features", "out_features"), ("nx", "nf")):
        found = tuple(getattr(child, name, None) for name in names)
        if all(isinstance(size, int) and size > 0 for size in found):
            return found  # type: ignore[return-value]
    return None


def _own_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor | None]:
    yield from module._parameters.values()
    yield from module._buffers.values()


def _plans(widths: dict[str, tuple[int, int]], drops: list[str], skipped: tuple[str, ...]) -> Iterator[Plan]:
    """Every block that has these widths."""
    places = list(itertools.product(("", *drops), repeat=2))
    places = [place for place in places if set(place) >= set(drops)]  # each dropout somewhere
    for names, (inner, outer) in itertools.product(itertools.permutations(widths), places):
        (width, hidden), (down, _) = widths[names[0]], widths[names[-1]]
        rest: dict[str, Any] = {"down": names[-1], "inner": inner, "outer": outer, "skipped": skipped}
        if len(names) == 3 and widths[names[1]] == (width, hidden) and down == hidden:
            for act in GATED_OPS:
                yield Plan(layout="apart", act=act, gate=names[0], up=names[1], **rest)
        if len(names) == 2 and hidden == 2 * down:
            for act in GATED_OPS:
                yield Plan(layout="gate first", act=act, gate=names[0], **rest)
                yield Plan(layout="gate last", act=act, gate=names[0], **rest)
        if len(names) == 2 and hidden == down:
            for act in PLAIN_OPS:
                yield Plan(layout="plain", act=act, gate=names[0], **rest)


def _run(module: Any, plan: Plan, x: torch.Tensor) -> Any:
    up = getattr(module, plan.up)(x) if plan.up_first else None
    gate = getattr(module, plan.gate)(x)
    if plan.layout == "plain":
        h = relu2(gate) if plan.act == "relu2" else gelu(gate, "tanh" if plan.act == "gelu_tanh" else "none")
        return _finish(module, plan, h)
    if plan.layout == "apart" and not plan.up_first:
        up = getattr(module, plan.up)(x)
    elif plan.layout == "gate last":
        up, gate = gate.chunk(2, -1)
    down = getattr(module, plan.down)
    if _is_bare(down) and _is_idle(module, plan.inner) and holds_product(gate, up, down.weight, down.bias):
        y = gated_linear(gate, up, down.weight, down.bias, GATES[plan.act])
        return getattr(module, plan.outer)(y) if plan.outer else y
    return _finish(module, plan, gated(gate, up, GATES[plan.act]))


def _finish(module: Any, plan: Plan, h: torch.Tensor) -> Any:
    """What follows the activation, each module called as it is."""
    for name in (plan.inner, plan.down, plan.outer):
        h = getattr(module, name)(h) if name else h
    return h


def _is_bare(down: torch.nn.Module) -> bool:
    """A linear layer and no more: a call of it is its product, and nobody would hear of the call."""
    return (
        type(down) is torch.nn.Linear  # no adapter, no quantization, no parametrization, not sharded by itself
        and "forward" not in vars(down)
        and vars(down).get("_compiled_call_impl") is None
        and not is_hooked(down)
        and not has_any_global_hook()
        and is_pytorchs(torch.nn.Linear)
        and all(x is None or probe.is_plain_tensor(x) for x in (down.weight, down.bias))
    )


def _stored_weight(down: Any) -> Any:
    """Not what a parametrization computes: each look at it is a step of a spectral norm's iteration, in training."""
    computed = getattr(getattr(down, "parametrizations", None), "weight", None)
    return getattr(down, "weight", None) if computed is None else next(computed.parameters(), None)


def _is_idle(module: Any, dropout: str) -> bool:
    """Whether it passes on what it gets, and nobody would hear of the call; or there is none."""
    if not dropout:
        return True
    found = getattr(module, dropout)
    is_off = type(found) is torch.nn.Dropout and (found.p == 0 or not found.training)
    return is_off and "forward" not in vars(found) and not is_hooked(found)


def _far(one: Any, other: Any) -> float:
    is_alike = isinstance(other, torch.Tensor) and one.shape == other.shape
    return float((one - other).abs().max()) if is_alike else float("inf")


def _swap(plan: Plan, proof: Proof) -> Swap:
    ops = PLAIN_OPS if plan.layout == "plain" else GATED_OPS

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or any(is_hooked(getattr(self, name)) for name in plan.skipped):
            return own(self, *args, **kwargs)
        (x,) = args
        if not proof.holds_for(x):
            return own(self, x)
        weight = _stored_weight(getattr(self, plan.down))
        is_mixed = isinstance(weight, torch.Tensor) and weight.is_floating_point() and weight.dtype != x.dtype
        if is_mixed and not is_autocast(x):
            return own(self, x)  # T5 keeps its last projection in float32, and casts
        return _run(self, plan, x)

    def arguments(module: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        x = first(args, kwargs)
        dtype = torch.get_autocast_dtype(x.device.type) if is_autocast(x) else x.dtype
        width = _width(getattr(module, plan.gate)) or (0, 0)
        h = torch.empty((*x.shape[:-1], width[1]), dtype=dtype, device=x.device)  # as a projection gives it
        return (h, h) if plan.layout == "apart" else (h,)

    names = f"{plan.gate} and {plan.up}" if plan.up else plan.gate
    what = f"{ops[plan.act]} of {names}" + (f", {plan.layout}" if plan.layout.startswith("gate") else "")
    return Swap(rule="mlp", op=ops[plan.act], forward=forward, arguments=arguments, hides=plan.skipped, what=what)


MLP = Rule(name="mlp", find=find)
