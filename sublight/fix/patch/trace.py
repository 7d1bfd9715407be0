"""What a forward calls, with gradients on: its ops in their order, and whatever lets its result depend on more.

Two modes listen while it runs. The one below autograd sees every op, whoever wrote the Python around it. The one above
sees what no op shows: values read into Python, sizes that are compared, a device that is asked for, hooks on gradients.
A branch shows by what it reads, though the probe may take only one side of it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sublight.backend import private

VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "reshape",
        "alias",
        "expand",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "narrow",
        "t",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "contiguous",
        "clone",
        "movedim",
        "flatten",
        "unflatten",
        "as_strided",
        "lift_fresh",
    ]
)
CASTS = frozenset(
    ("_to_copy", "to", "promote_types", "detach")
)  # below autograd, what it saves of an op's result is a detached one
READS = {  # into Python, where a branch may follow
    "_local_scalar_dense": "reads values, and may branch on them",
    "equal": "reads values, and may branch on them",
    "is_nonzero": "reads values, and may branch on them",
}
SIZES = "compares sizes, and may do otherwise for others"
DIMS = "counts dimensions, and may do otherwise for others"
CUTS = "cuts at a fixed place, and may do otherwise beyond it"
STOPS = "detaches: its gradient is not the formula's"
ASKS = {  # functions and properties of tensors that no op shows
    "tolist": READS["equal"],
    "numpy": READS["equal"],
    "item": READS["equal"],
    "__bool__": READS["equal"],
    "__float__": READS["equal"],
    "__int__": READS["equal"],
    "__index__": READS["equal"],
    "__array__": READS["equal"],
    "data_ptr": "reads where a tensor lies",
    "is_cuda": "asks for the device, and may do otherwise on a GPU",
    "device": "asks for the device, and may do otherwise on a GPU",
    "get_device": "asks for the device, and may do otherwise on a GPU",
    "register_hook": "hooks a gradient",
    "register_post_accumulate_grad_hook": "hooks a gradient",
    "retain_grad": "keeps a gradient",
    "requires_grad": "asks whether a gradient is wanted",
    "requires_grad_": "changes whether a gradient is wanted",
    "data": STOPS,
    "detach": STOPS,
    "detach_": STOPS,
    "grad": "reads a gradient",
    "is_contiguous": "asks how a tensor lies",
    "stride": "asks how a tensor lies",
    "storage_offset": "asks how a tensor lies",
    "untyped_storage": "asks how a tensor lies",
    "layout": "asks how a tensor lies",
    "is_sparse": "asks how a tensor lies",
    "_base": "asks how a tensor lies",
    "nbytes": SIZES,
    "__iter__": SIZES,
    "__len__": SIZES,  # which `len` makes a plain number
    "ndim": DIMS,
    "dim": DIMS,
    "ndimension": DIMS,
    "is_leaf": "asks where a tensor comes from",
    "_version": "asks where a tensor comes from",
    "grad_fn": "asks where a tensor comes from",
    "is_inference": "asks where a tensor comes from",
}
TOLD = frozenset(["dtype", "shape", "size", "numel", "nelement", "is_floating_point", "is_complex", "promote_types",
                  "result_type", "element_size", "itemsize"])  # fmt: skip
MOVES = frozenset(["cpu", "cuda", "xpu", "mtia", "hpu", "ipu", "pin_memory", "share_memory_", "to_sparse", "to_mkldnn"])
NO_END = 1 << 62  # of a slice that goes to the end
ACTIVE: ContextVar[Recorder | None] = ContextVar("ACTIVE", default=None)


@dataclass(slots=True)
class Recorder:
    """What was called so far."""

    ops: list[str] = field(default_factory=list)
    numbers: list[tuple[str, Any]] = field(default_factory=list)
    oddities: list[str] = field(default_factory=list)
    allowed: tuple[str, ...] = ()
    is_muted: bool = False

    def note(self, oddity: str) -> None:
        if not self.is_muted:
            self.oddities.append(oddity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One call of a forward."""

    ops: tuple[str, ...]  # of ATen, without views and casts; `call x` for a stand-in's
    views: tuple[str, ...]
    numbers: tuple[tuple[str, Any], ...]  # that Python gave to the ops
    oddity: str  # the first thing that lets its result depend on more; empty: nothing
    result: Any

    def why_not(self, budget: Mapping[str, int], what: str) -> str:
        """Why these are not the ops of a formula, which needs each at most so often; empty where they are."""
        if self.oddity:
            return f"its forward {self.oddity}"
        for name, count in Counter(self.ops).items():
            if count > budget.get(name, 0):
                often = f" {count} times" if name in budget else ""
                return f"its forward calls {name.strip('_')}{often}, which {what} does not"
        return ""


def trace(call: Callable[..., Any], *inputs: Any, allowed: tuple[str, ...] = (), **named: Any) -> Trace:
    """The call's ops; `allowed` may be asked of a tensor without being an oddity."""
    recorder = Recorder(allowed=allowed)
    token = ACTIVE.set(recorder)
    try:
        with _Above(recorder), _Below(recorder):
            result = call(*inputs, **named)
    finally:
        ACTIVE.reset(token)
    for each in result if isinstance(result, tuple | list) else (result,):
        if isinstance(each, torch.Tensor) and (custom := _own_backward(each)):
            recorder.note(f"has a backward pass of its own ({custom})")
    ops = tuple(name for name in recorder.ops if name not in VIEWS | CASTS)
    views = tuple(name for name in recorder.ops if name in VIEWS)
    numbers = tuple(each for each in recorder.numbers if each[0] not in VIEWS | CASTS)
    return Trace(ops=ops, views=views, numbers=numbers, oddity=next(iter(recorder.oddities), ""), result=result)


@contextlib.contextmanager
def as_one_op(name: str) -> Iterator[None]:
    """What runs inside stands in for a module: it is recorded as one call."""
    recorder = ACTIVE.get()
    if recorder is None or recorder.is_muted:
        yield
        return
    recorder.ops.append(f"call {name}")
    recorder.is_muted = True
    try:
        yield
    finally:
        recorder.is_muted = False


class Length(int):
    """A size that knows when it is compared, or leaves for a number that would not know."""

    def _compared(self) -> None:
        if (recorder := ACTIVE.get()) is not None:
            recorder.note(SIZES)

    def __bool__(self) -> bool:
        self._compared()
        return int.__bool__(self)


def _leaving(name: str) -> Any:
    theirs = getattr(int, name)

    def leave(self: Length, *others: Any) -> Any:
        self._compared()
        return theirs(self, *others)

    return leave


def _computing(name: str) -> Any:
    theirs = getattr(int, name)

    def compute(self: Length, *others: Any) -> Any:
        result = theirs(self, *others)
        if result is NotImplemented and not any(isinstance(each, torch.Tensor) for each in others):
            self._compared()  # with a float or a list, which would not know
        return Length(result) if type(result) is int else result

    return compute


def _asked(name: str) -> property:
    def ask(self: Length) -> Any:
        self._compared()
        return getattr(int.__pos__(self), name)

    return property(ask)


for _name in ("lt", "le", "gt", "ge", "eq", "ne", "hash", "int", "float", "truediv", "rtruediv", "divmod", "rdivmod"):
    setattr(Length, f"__{_name}__", _leaving(f"__{_name}__"))
for _name in ("str", "repr", "format", "round", "floor", "ceil", "trunc", "and", "or", "xor", "lshift", "rshift"):
    setattr(Length, f"__{_name}__", _leaving(f"__{_name}__"))
for _name in ("rand", "ror", "rxor", "rlshift", "rrshift", "rpow", "invert", "pos"):
    setattr(Length, f"__{_name}__", _leaving(f"__{_name}__"))
for _name in ["add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "rfloordiv", "mod", "rmod", "neg", "abs", "pow"]:
    setattr(Length, f"__{_name}__", _computing(f"__{_name}__"))
for _name in (each for each in dir(int) if not each.startswith("_")):
    setattr(Length, _name, _asked(_name))


class _Above(TorchFunctionMode):
    """Above autograd: torch's functions, and tensors' properties."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_property = getattr(func, "__name__", "") in ("__get__", "__set__")
        name = func.__self__.__name__ if is_property else getattr(func, "__name__", "")
        result = func(*args, **(kwargs or {}))
        if self.recorder.is_muted:
            return result
        if name == "__getitem__" and _reaches_beyond(*args):
            self.recorder.note(CUTS)
        if name not in self.recorder.allowed and (oddity := ASKS.get(name) or _leaves_torch(name, result)):
            self.recorder.note(oddity)
        if "device" not in self.recorder.allowed and _moves(name, args, kwargs or {}):
            self.recorder.note("moves a tensor to another device")
        if is_property and func.__name__ == "__set__":
            self.recorder.note(f"sets {name} of a tensor")
        if name in ("shape", "size") and isinstance(result, torch.Size):
            return _Shape(map(Length, result))
        return Length(result) if name in ("size", "numel", "__len__", "nelement") and type(result) is int else result


def _leaves_torch(name: str, result: Any) -> str:
    """What is neither a tensor nor one of the facts that trials vary: a branch may follow it."""
    each = result if isinstance(result, tuple | list) else (result,)
    return "" if name in TOLD or all(isinstance(x, torch.Tensor | None) for x in each) else f"asks a tensor for {name}"


def _moves(name: str, args: Any, kwargs: Any) -> bool:
    """x.cpu(), x.to("cuda"), which a trial on a CPU does not show."""
    names_one = any(isinstance(x, str | torch.device) for x in (*args[1:], *kwargs.values()))
    return name in MOVES or (name in ("to", "type") and names_one)


class _Shape(tuple[Length, ...]):
    """A shape whose sizes know when they are compared."""

    def __len__(self) -> int:
        if (recorder := ACTIVE.get()) is not None:
            recorder.note(DIMS)
        return super().__len__()

    def numel(self) -> int:
        total = Length(1)
        for each in self:
            total = total * each  # type: ignore[assignment]
        return total

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return _Shape(found) if isinstance(index, slice) else found


class _Below(private.TorchDispatchMode):
    """Below autograd: every op."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.recorder.is_muted and not _is_identity(func, args):
            space, _, name = func._schema.name.partition("::")
            name += "_tanh" if name == "gelu" and (kwargs or {}).get("approximate") == "tanh" else ""
            self.recorder.ops.append(name if space == "aten" else f"{space}::{name}")
            self.recorder.numbers += [(name, x) for x in (*args, *(kwargs or {}).values()) if _is_number(x)]
            if name == "lift_fresh" and not args[0].is_meta:  # torch.tensor(…) of numbers, which may come of a size
                self.recorder.numbers.append(("a constant", args[0].tolist()))
            if name in READS:
                self.recorder.note(READS[name])
            if _cuts_beyond(name, args):
                self.recorder.note(CUTS)
            if name == "squeeze" and _drops_nothing(*args):
                self.recorder.note("drops dimensions of one element, which a trial does not have")
            if name.startswith("nll_loss") and args[2] is not None:
                self.recorder.note("weighs classes")
        return func(*args, **(kwargs or {}))


def _is_number(x: Any) -> bool:
    return all(map(_is_number, x)) if isinstance(x, list) else isinstance(x, bool | int | float)


def _cuts_beyond(name: str, args: Any) -> bool:
    """x.split(2048), x.narrow(0, 2048) of fewer rows: longer inputs come to other places."""
    if name not in ("slice", "split") or len(args) < 2:
        return False
    if name == "split":
        return bool(args[1] > args[0].shape[args[2] if len(args) > 2 else 0])
    return any(place is not None and args[0].shape[args[1]] < abs(place) < NO_END for place in args[2:4])


def _drops_nothing(x: torch.Tensor, dim: Any = None) -> bool:
    """x.squeeze() of dimensions that are longer: of a batch of one it gives another shape."""
    dims = range(x.dim()) if dim is None else dim if isinstance(dim, list | tuple) else (dim,)
    return any(x.shape[each] != 1 for each in dims) if x.dim() else False


def _reaches_beyond(x: torch.Tensor, index: Any) -> bool:
    """x[:, :2048] or x[:, -2048:] of fewer rows, whose slice no op shows."""
    places = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [each for each in places if not isinstance(each, torch.Tensor)]:
        at = next(i for i, each in enumerate(places) if each is Ellipsis)
        named = sum(each is not None for each in places) - 1
        places[at : at + 1] = [slice(None)] * (x.dim() - named)
    sizes = iter(x.shape)
    for each in places:
        size = 0 if each is None else next(sizes, 0)
        if isinstance(each, slice) and any(type(end) is int and abs(end) > size for end in (each.start, each.stop)):
            return True
    return False


def _is_identity(func: Any, args: Any) -> bool:
    """x * 1, x / 1: a setting that is not used; if it is changed later, the module's own forward runs."""
    is_factor = func._schema.name in ("aten::mul", "aten::div") and len(args) == 2
    return is_factor and isinstance(args[1], int | float) and args[1] == 1


def _own_backward(result: torch.Tensor) -> str:
    """The name of a torch.autograd.Function on the way back from this tensor."""
    todo, seen = [result.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return node.name()
        todo += [following for following, _ in node.next_functions]
    return ""
