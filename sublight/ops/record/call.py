"""What happens when one of our ops is called: who else must hear of it, which plan it has, how it runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import torch

from sublight.backend import native
from sublight.backend.listen import LISTENERS
from sublight.backend.native.program import program_of
from sublight.backend.state import PLAIN, dispatch_modes, is_capturing, is_forward_ad, jit_trace, transforms
from sublight.op import Plan
from sublight.ops.record.autocast import as_ours
from sublight.ops.record.gradient import function_of
from sublight.ops.record.plans import MOST_KNOWN, key_function, remember
from sublight.ops.record.run import Values

Run = Callable[..., Values]  # (*args) -> results


def call_of(op: Any) -> tuple[Run, NativeCall]:
    """The call of a `library.Registered`: one function with all it needs at hand, since every attribute that it looks
    up costs the caller; and its way into C++."""
    has_lists = any("List[Tensor]" in kind for kind in op.kinds.values())
    tensor_names, list_names = (
        frozenset(name for name, kind in op.kinds.items() if word in kind) for word in ("Tensor", "List[int]")
    )
    key_of = key_function(op.arguments, tensor_names, list_names, frozenset(op.free))
    plans: dict[Hashable, Run] = {}
    registered = getattr(torch.ops.sublight, op.name).default
    reference, mine, is_compiling = op.reference, op.mine, torch.compiler.is_compiling
    quick = NativeCall(op, tensor_names)

    def through_torch(*args: Any) -> Values:
        """Whoever traces, wraps or watches sees one op, where our kernels would take these arguments."""
        if reference is not None and op.why_torch(*args):
            return as_ours(reference, tensors_of(args))(*args)
        return mine(registered(*args))

    def first(key: Hashable | None, args: tuple[Any, ...]) -> Values:
        """A call that has no plan yet, or that PyTorch has to hear of."""
        tensors = tensors_of(args)
        is_transform = transforms() is not None or is_forward_ad() or jit_trace() is not None
        if is_transform and reference is not None:
            return as_ours(reference, tensors)(*args)
        if reference is not None and is_sharded(tensors):
            return reference(*args)
        if dispatch_modes() or any(type(x) not in PLAIN for x in tensors):
            return through_torch(*args)
        plan = op.decide(*args)
        run = run_of(op, plan, tensors)
        results = run(*args)
        if key is not None and not LISTENERS:  # a listener may have kept the kernels from being compiled
            remember(plans, key, run)
            quick.learn(args, plan, run)
        return results

    def in_python(*args: Any) -> Values:
        if has_lists or dispatch_modes() or transforms() is not None or is_forward_ad() or jit_trace():
            return first(None, args)
        key = key_of(*args)
        run = plans.get(key)
        return first(key, args) if run is None else run(*args)

    def call(*args: Any) -> Values:
        if is_compiling():
            return through_torch(*args)
        return in_python(*args) if quick.call is None else quick.call(*args)

    def begin(module: Any) -> None:
        quick.begin(in_python, module)
        plans.clear()  # the host's time decided some of them, and it is another one now

    if not has_lists:
        native.when_ready(begin)
    return call, quick


class NativeCall:
    """An op's calls in C++, from when the native path is ready (`backend/native`): `call` is None until then."""

    __slots__ = ("call", "differentiates", "kept", "kinds", "module", "op")

    def __init__(self, op: Any, tensors: frozenset[str]) -> None:
        self.op = op
        self.kinds = "".join("t" if name in tensors else "f" if name in op.free else "v" for name in op.arguments)
        self.call: Any = None
        self.differentiates = False  # backward passes run in C++, too
        self.module: Any = None
        self.kept: list[Plan] = []  # whose compiled kernels are launched without Python knowing

    def begin(self, in_python: Run, module: Any) -> None:
        """From now on calls go to C++; kinds of calls that it does not know come back to `in_python`."""
        op, results = self.op, self.op.results or 0
        call = module.call(op.name, self.kinds, results, (results or len(op.outputs)) > 1, in_python)
        by = getattr(op.gradient and op.gradient.by, "native", None)  # what is no op of its own stays in Python
        is_known = op.gradient is not None and set(op.gradient.options) <= set(op.arguments)
        if is_known and by is not None and by.call is not None:
            backward = by.call
            module.differentiate(call, backward, *op.gradient.places(op), partial(op.gradient.from_native, op))
            self.differentiates = True
        self.module, self.call = module, call

    def learn(self, args: tuple[Any, ...], plan: Plan, run: Run) -> None:
        """Calls like this one run in C++ from now on, where that is possible; results are the same."""
        if not native.is_wanted(tensors_of(args)[0]) or self.call is None or len(self.kept) >= MOST_KNOWN:
            return
        if plan.provider == "torch":
            done = self.module.delegate(self.call, args, run)
        else:
            program = None if self.op.launch or plan.captured else program_of(plan, self.op.arguments)
            done = program is not None and self.module.teach(self.call, args, *program)
        if done:
            self.kept.append(plan)


def run_of(op: Any, plan: Plan, tensors: list[torch.Tensor]) -> Run:
    """How calls of this kind run."""
    if plan.captured is not None:
        eager = run_of(op, Plan(provider=plan.provider, theirs=plan.theirs, reason=plan.reason), tensors)
        captured = run_of(op, plan.captured, tensors)
        return lambda *args: captured(*args) if is_capturing() else eager(*args)
    if plan.provider == "torch":
        if op.reference is None:  # a part of an op: only a tensor that is negated lazily keeps it from our kernels
            return lambda *args: op.call(*[x.resolve_neg() if isinstance(x, torch.Tensor) else x for x in args])
        return as_ours(op.reference, tensors)
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


# A call that moves less ends on today's fastest GPU (4 TB/s) before Python has made it, which takes 20 µs on an H200's
# host; PyTorch's own ops take 10, ours in C++ 8.
SMALL_BYTES = 80e6


def hosted(op: Any, plan: Plan, args: tuple[Any, ...]) -> Plan:
    """The plan, or PyTorch's own op where the host's time decides: in eager mode a caller waits for the slower of host
    and device, so a quicker kernel behind a slower call loses. While a graph is captured, the plan itself holds."""
    tensors = tensors_of(args)
    if op.reference is None or not tensors[0].is_cuda:
        return plan
    if op.theirs_bytes is not None:
        moved = op.theirs_bytes(*args)
    else:
        is_native = native.State.module is not None and op.launch is None
        is_quick = is_native and (op.native.differentiates or not wants_grad(args))
        is_one_op = op.theirs.replace(".", "_").isidentifier()  # two of PyTorch's take as long as one of ours
        if is_quick or not is_one_op:
            return plan
        made = sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in plan.buffers.values())
        moved = made + sum(x.nbytes for x in tensors)
    if moved >= SMALL_BYTES:
        return plan
    return Plan(provider="torch", theirs=op.theirs, reason="small: the host decides", captured=plan)


def tensors_of(args: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among the arguments, those in lists included."""
    found: list[torch.Tensor] = []
    for x in args:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += [each for each in x if isinstance(each, torch.Tensor)]
    return found


def is_sharded(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether tensors are divided among processes: PyTorch's ops know how, of ours it would ask for a rule."""
    module = sys.modules.get("torch.distributed.tensor")  # nobody has such a tensor who has not loaded it
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


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
