"""What happens when one of our ops is called: who else must hear of it, which plan it has, how it runs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from sublight.backend.state import PLAIN, dispatch_modes, is_capturing, jit_trace, transforms
from sublight.op import Plan
from sublight.ops.record.gradient import function_of
from sublight.ops.record.plans import key_function, remember
from sublight.ops.record.run import Values

Run = Callable[..., Values]  # (*args) -> results


def call_of(op: Any) -> Run:
    """The call of a `library.Registered`: one function with all it needs at hand, since every attribute that it looks
    up costs the caller."""
    kinds = {each.name: str(each.type) for each in torch._C.parse_schema(op.schema).arguments}
    has_lists = any("List[Tensor]" in kind for kind in kinds.values())
    tensor_names, list_names = (
        frozenset(name for name, kind in kinds.items() if word in kind) for word in ("Tensor", "List[int]")
    )
    key_of = key_function(op.arguments, tensor_names, list_names, frozenset(op.free))
    plans: dict[Hashable, Run] = {}
    registered = getattr(torch.ops.sublight, op.name).default
    reference, mine, is_compiling = op.reference, op.mine, torch.compiler.is_compiling

    def through_torch(*args: Any) -> Values:
        """Whoever traces, wraps or watches sees one op, where our kernels would take these arguments."""
        if reference is not None and op.why_torch(*args):
            return reference(*args)
        return mine(registered(*args))

    def first(key: Hashable | None, args: tuple[Any, ...]) -> Values:
        """A call that has no plan yet, or that PyTorch has to hear of."""
        is_transform = transforms() is not None or forward_ad._current_level >= 0 or jit_trace() is not None
        if is_transform and reference is not None:
            return reference(*args)
        tensors = tensors_of(args)
        if dispatch_modes() or any(type(x) not in PLAIN for x in tensors):
            return through_torch(*args)
        run = run_of(op, op.decide(*args), tensors)
        if key is not None:
            remember(plans, key, run)
        return run(*args)

    def call(*args: Any) -> Values:
        if is_compiling():
            return through_torch(*args)
        if has_lists or dispatch_modes() or transforms() is not None or forward_ad._current_level >= 0 or jit_trace():
            return first(None, args)
        key = key_of(*args)
        run = plans.get(key)
        return first(key, args) if run is None else run(*args)

    return call


def run_of(op: Any, plan: Plan, tensors: list[torch.Tensor]) -> Run:
    """How calls of this kind run."""
    if plan.captured is not None:
        eager = run_of(op, Plan(provider=plan.provider, theirs=plan.theirs, reason=plan.reason), tensors)
        captured = run_of(op, plan.captured, tensors)
        return lambda *args: captured(*args) if is_capturing() else eager(*args)
    if plan.provider == "torch":
        if op.reference is None:  # a part of an op: only a tensor that is negated lazily keeps it from our kernels
            return lambda *args: op.call(*[x.resolve_neg() if isinstance(x, torch.Tensor) else x for x in args])
        return op.reference  # type: ignore[no-any-return]
    if wants_grad(tensors):
        if op.gradient is None:
            registered = getattr(torch.ops.sublight, op.name).default  # refuses, in PyTorch's words
            return lambda *args: op.mine(registered(*args))
        run = op.runner(plan)
        apply = function_of(op)
        return lambda *args: apply(run, *args)
    run = op.runner(plan)
    if op.results is None or op.plan_results is not None:
        return run  # type: ignore[no-any-return]
    if op.results == 1:
        return lambda *args: run(*args)[0]
    return lambda *args: run(*args)[: op.results]


def tensors_of(args: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the arguments, those in lists included."""
    found: list[torch.Tensor] = []
    for x in args:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += [each for each in x if isinstance(each, torch.Tensor)]
    return found


def wants_grad(args: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args)


def guarded(run: Run) -> Run:
    """Triton launches on the current GPU: of several, that must be the tensors' own."""
    if torch.cuda.device_count() <= 1:
        return run

    def call(*args: Any) -> Values:
        first = tensors_of(args)[0]
        if not first.is_cuda or first.get_device() == torch.cuda.current_device():
            return run(*args)
        with torch.cuda.device(first.device):
            return run(*args)

    return call
