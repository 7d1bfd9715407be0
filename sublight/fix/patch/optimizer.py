"""torch.optim.AdamW's step by one launch of ours, on the optimizer's own groups and state.

Only `step` is set, on the instance: the optimizer keeps its class, its groups and its state where PyTorch has them, so
state dicts, schedulers and gradient scalers see what they saw. Steps that PyTorch counts on the host are counted there
still; the kernels read a count of ours on the device.
"""

from __future__ import annotations

import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sublight.backend import private
from sublight.correct import Inputs
from sublight.errors import BadInput
from sublight.fix.patch.ahead import begin
from sublight.fix.patch.record import Patch, Row
from sublight.ops.adamw.adamw import why_torch
from sublight.ops.adamw.optimizer import AdamW

MARK = "__sublight__"  # on the function behind a swapped step: its Fused
KNOWN = (torch.optim.AdamW, torch.optim.Adam)
UNKNOWN = ("amsgrad", "differentiable")
SCALERS = ("grad_scale", "found_inf")  # what a GradScaler leaves to an optimizer that unscales by itself


class Fused:
    """Our step for one optimizer: the tables of addresses, and the steps on the device where PyTorch's are not."""

    def __init__(self, before: Any, compiling: threading.Thread | None = None) -> None:
        self.is_on = True
        self.compiling = compiling  # our kernels, in the background
        self.before = before  # the step that the instance had of its own: a scheduler's
        self.ours = AdamW([torch.zeros(1)])  # for its tables and its launches; its own parameter is never stepped
        self.steps: dict[torch.Tensor, tuple[torch.Tensor, int, torch.Tensor]] = {}  # host's, its count, device's

    def work(self, optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], list[Inputs]]]:
        """Of each group, parameter, gradient, averages and step of what has a gradient."""
        work = [(group, [self._five(optimizer, group, p) for p in _live(group)]) for group in optimizer.param_groups]
        return [(group, fives) for group, fives in work if fives]

    def _five(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], p: torch.Tensor) -> Inputs:
        state = optimizer.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if _is_on_device(group) else "cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        four = (p.detach(), p.grad, state["exp_avg"], state["exp_avg_sq"])
        return *(_local(x) for x in four), self._step(p, state["step"])

    def _step(self, p: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        if step.device == p.device:
            return step
        host, count, device = self.steps.get(p, (None, -1, step))
        if host is not step or count != int(step):  # new, loaded, or stepped by somebody else
            device = torch.full((), float(step), dtype=torch.float32, device=p.device)
        self.steps[p] = (step, int(step), device)
        return device

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.compiling is not None:
            self.compiling.join()
            self.compiling = None
        work = self.work(optimizer)
        self.ours._by_ours(work)
        host = []
        for p in (p for group, _ in work for p in _live(group) if p in self.steps):  # no group's that was taken out
            step, count, device = self.steps[p]
            if step.device != p.device:
                host.append(step)
                self.steps[p] = (step, count + 1, device)
        if host:
            private.foreach_add_(host, torch.ones(()))


def patch_optimizer(optimizer: torch.optim.Optimizer) -> Patch:
    """Give the optimizer our step, if it is understood and ours wins for its parameters."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(f"patch takes a torch.nn.Module or an optimizer, not {type(optimizer).__name__}")
    if is_patched(optimizer):
        return Patch(rows=())
    reason = _why_left(optimizer) or _why_slower(optimizer)
    if not reason:
        _apply(optimizer)
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    row = Row(
        rule="optimizer",
        kind=type(optimizer).__name__,
        names=("step",),
        is_swapped=not reason,
        reason=reason or f"{count} tensors in one launch a group",
    )
    return Patch(rows=(row,))


def unpatch_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Give the optimizer its own step back; whether it had ours."""
    fused = _fused_of(optimizer)
    if fused is None or not fused.is_on:
        return False
    fused.is_on = False  # a scheduler made since holds our step: it then calls the optimizer's own
    if MARK in getattr(getattr(optimizer.__dict__["step"], "__func__", None), "__dict__", {}):
        del optimizer.__dict__["step"]
        if fused.before is not None:
            optimizer.step = fused.before  # type: ignore[method-assign]
    return True


def is_patched(optimizer: torch.optim.Optimizer) -> bool:
    fused = _fused_of(optimizer)
    return fused is not None and fused.is_on


def _fused_of(optimizer: torch.optim.Optimizer) -> Fused | None:
    """Ours is the instance's step, or what a scheduler's step wraps."""
    step = optimizer.__dict__.get("step")
    function = getattr(step, "__func__", step)
    while function is not None and MARK not in vars(function):
        function = getattr(function, "__wrapped__", None)
    return None if function is None else vars(function)[MARK]


def _apply(optimizer: torch.optim.Optimizer) -> None:
    before = optimizer.__dict__.get("step")
    fused = Fused(before, begin(lambda: _step_alike(optimizer)))
    own: Callable[..., Any] = before if before is not None else functools.partial(type(optimizer).step, optimizer)
    hooked = torch.optim.Optimizer.profile_hook_step(lambda self: fused.step(self))  # the user's hooks, and the trace

    def step(self: Any, closure: Any = None) -> Any:
        if closure is not None or not fused.is_on or _why_not_now(self):
            return own() if closure is None else own(closure)
        self._opt_called = True  # what a scheduler looks for
        return hooked(self)

    if before is not None and hasattr(before, "_wrapped_by_lr_sched"):
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    vars(step)[MARK] = fused
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def _step_alike(optimizer: torch.optim.Optimizer) -> None:
    """A step of small tensors of the same number and data types: it compiles what the optimizer's own will launch.

    Without the hooks around `step`: those would hear of it who count the steps of all optimizers.
    """
    groups = []
    for group in optimizer.param_groups:
        alike = [torch.nn.Parameter(torch.zeros(16, dtype=p.dtype, device=p.device)) for p in group["params"]]
        for p in alike:
            p.grad = torch.zeros_like(p)
        groups.append({"params": alike, **{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}})
    ours = AdamW(groups, maximize=optimizer.param_groups[0]["maximize"])
    with torch.no_grad():
        inspect.unwrap(AdamW.step)(ours)


def _live(group: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (p for p in group["params"] if p.grad is not None)


def _local(x: Any) -> Any:
    """What a sharded tensor holds here: an update by elements knows no neighbours."""
    return x.to_local() if hasattr(x, "to_local") else x


def _why_left(optimizer: torch.optim.Optimizer) -> str:
    """What of the optimizer, its class and its groups, is not understood."""
    if isinstance(optimizer, AdamW):
        return "it is ours already"
    if not isinstance(optimizer, KNOWN):
        return f"no kernel of ours for {type(optimizer).__name__}"
    if inspect.unwrap(type(optimizer).step) not in {inspect.unwrap(known.step) for known in KNOWN}:
        return "its class has a step of its own"
    before = optimizer.__dict__.get("step")
    if before is not None and not hasattr(before, "_wrapped_by_lr_sched"):
        return "somebody else has set its step"
    return next((reason for group in optimizer.param_groups if (reason := _why_group(optimizer, group))), "")


def _why_group(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str:
    for name in UNKNOWN:
        if group.get(name):
            return f"{name}=True, which our kernel does not know"
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    if group["weight_decay"] and not decoupled:
        return "Adam's weight decay is part of the gradient, AdamW's is not"
    if any(isinstance(group[name], torch.Tensor) for name in ("weight_decay", "eps")) or any(
        isinstance(beta, torch.Tensor) for beta in group["betas"]
    ):
        return "betas, eps or weight_decay is a tensor"
    return ""


def _why_slower(optimizer: torch.optim.Optimizer) -> str:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return next((reason for p in params if (reason := _why_tensor(p))), "" if params else "it has no parameters")


def _why_tensor(p: torch.Tensor) -> str:
    return why_torch([p, _zero(p.device)])


@functools.cache
def _zero(device: torch.device) -> torch.Tensor:
    return torch.zeros((), device=device)


def _why_not_now(optimizer: torch.optim.Optimizer) -> str:
    """Why PyTorch makes this step, which may differ from the one before."""
    if torch.compiler.is_compiling():
        return "a compiler fuses PyTorch's own"
    if any(getattr(optimizer, name, None) is not None for name in SCALERS):
        return "a GradScaler wants the gradients unscaled in the step"
    groups = optimizer.param_groups
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing() and not all(map(_is_on_device, groups)):
        return "a graph cannot count steps on the host: PyTorch says so"
    for group in groups:
        if reason := _why_group(optimizer, group):
            return reason
        if any(_why_gradient(p) or _why_tensor(p) for p in _live(group)):
            return "a gradient is sparse or sharded otherwise, or a tensor is not for our kernels"
    return ""


def _is_on_device(group: dict[str, Any]) -> bool:
    """Whether PyTorch counts the group's steps on the device."""
    return bool(group.get("capturable") or group.get("fused"))


def _why_gradient(p: Any) -> bool:
    return p.grad.layout != torch.strided or getattr(p.grad, "placements", None) != getattr(p, "placements", None)
