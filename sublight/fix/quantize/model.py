"""Pack the linear layers of a model, and put them back.

Only what is known to be a linear layer by its class is taken, and only where nothing hangs on it: no hooks, no
parametrization, no weight that another module shares. The weights as they were stay in the host's memory, so that
`unpatch` gives the model back bit by bit.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from sublight.errors import BadInput, nearest
from sublight.fix.quantize.linear import PackedLinear, weight_of
from sublight.fix.quantize.record import Quantized, Row
from sublight.ops.matmul.packing import BITS, check_group, quantize_weight

WAYS = {f"w{bits}a16": bits for bits in reversed(BITS)}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
KEPT = "_as_it_was"  # the layer before it was packed


def quantize(
    model: torch.nn.Module,
    how: str = "w4a16",
    *,
    group: int = 128,
    skip: Sequence[str] | None = None,
    verify: Any = None,
    rounds: int = 20,
    keep: bool = True,
) -> Quantized:
    """Pack the model's linear layers, in place, and say what was done.

    `skip` are names or patterns of layers to leave ("*.down_proj"); unless it is given, the output head is left, whose
    error goes straight into the loss. `verify` is a batch: the change of its loss, or of its outputs, is reported.
    `rounds` fit the zeros to the weights; `keep=False` gives up the weights as they were, and with them the way back.
    """
    if not isinstance(model, torch.nn.Module):
        raise BadInput(f"quantize takes a torch.nn.Module, not {type(model).__name__}")
    if weight_of(model) is not None:
        raise BadInput("the model is itself a linear layer: wrap it in a torch.nn.Sequential")
    if how not in WAYS:
        raise BadInput(f"unknown way {how!r}: {nearest(str(how), list(WAYS))}")
    if not isinstance(group, int):
        raise BadInput(f"group={group!r}: a whole number of weights that share a scale, such as 128")
    skip = (skip,) if isinstance(skip, str) else skip
    names = {name for name, _ in model.named_modules() if name}
    for pattern in skip or ():
        if not any(fnmatch.fnmatch(name, pattern) for name in names):
            raise BadInput(f"skip={pattern!r} names no module: {nearest(pattern, sorted(names))}")
    before = _outcome(model, verify) if verify is not None else None
    shared = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    head = _head(model) if skip is None else None
    rows: dict[tuple[str, str], list[tuple[str, int, int]]] = {}
    for name, module in list(model.named_modules()):
        weight = weight_of(module)
        if weight is None:
            continue
        if any(fnmatch.fnmatch(name, pattern) for pattern in skip or ()):
            reason = "skipped, as asked"
        elif module is head:
            reason = "the output head: its error goes straight into the loss; skip=() packs it, too"
        else:
            reason = why_left(module, weight, group, WAYS[how], shared)
        after_bytes = weight.nbytes
        reason = reason or why_too_coarse(weight, WAYS[how], group)
        if not reason:
            packed = _packed(module, weight, WAYS[how], group, rounds=rounds, keep=keep)
            _put(model, module, packed)
            after_bytes = packed.nbytes
        rows.setdefault((type(module).__name__, reason), []).append((name, weight.nbytes, after_bytes))
    return Quantized(
        how=how,
        rows=tuple(
            Row(
                kind=kind,
                names=tuple(name for name, _, _ in found),
                is_packed=not reason,
                reason=reason or f"{WAYS[how]} bits, groups of {group}",
                before_bytes=sum(bytes_ for _, bytes_, _ in found),
                after_bytes=sum(bytes_ for _, _, bytes_ in found),
            )
            for (kind, reason), found in rows.items()
        ),
        change=_change(before, _outcome(model, verify)) if before is not None else "",
        is_kept=keep,
    )


def why_left(module: torch.nn.Module, weight: torch.Tensor, group: int, bits: int, shared: Mapping[int, int]) -> str:
    """Why a linear layer is not packed; empty where it is."""
    own: Any = module._parameters.get("weight")
    if own is None:
        return "its weight is no plain parameter"
    if type(own) is not torch.nn.Parameter or weight.dtype not in DTYPES or weight.layout != torch.strided:
        return f"its weight is a {type(own).__name__} of {str(weight.dtype).removeprefix('torch.')}"
    if weight.device.type == "meta":
        return "its weight has no data (meta)"
    if shared[id(own)] > 1:
        return "it shares its weight with another module"
    if "forward" in module.__dict__ or any(getattr(module, hooks, None) for hooks in HOOKS):
        return "it has hooks, or a forward of its own"
    try:
        check_group(weight.shape[1], group, bits)
    except BadInput as error:
        return str(error)
    return "" if torch.isfinite(weight).all() else "its weight has values that are not finite"


def why_too_coarse(weight: torch.Tensor, bits: int, group: int) -> str:
    """Why scales and zeros of the weight's own data type cannot hold its groups to half a step; empty where they can.

    The least scale of float16 is 6e-8, and bfloat16 has no odd numbers beyond 256.
    """
    grouped = weight.detach().float().reshape(weight.shape[0], -1, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    low, high = (x[high > low] for x in (low, high))  # a group of one value is its own scale
    most = 2**bits - 1
    scale = (high - low) / most
    zero = -low / scale
    scale_off, zero_off = ((x.to(weight.dtype).float() - x).abs() for x in (scale, zero))
    if bool((most * scale_off <= scale / 2).all() and (zero_off <= 0.5).all()):
        return ""
    dtype = str(weight.dtype).removeprefix("torch.")
    return f"scales in {dtype} are too coarse for groups of its weights: pack it in float32"


def _packed(
    module: torch.nn.Module, weight: torch.Tensor, bits: int, group: int, *, rounds: int, keep: bool
) -> PackedLinear:
    packed = PackedLinear(
        *quantize_weight(weight, bits, group, rounds=rounds if bits < 8 else 0),
        module.bias,  # type: ignore[arg-type]
        bits=bits,
        in_features=weight.shape[1],
    )
    packed.train(module.training)
    if keep:
        own: Any = module.weight
        packed.__dict__[KEPT] = module
        own.data = own.data.cpu()
    return packed


def unquantize(model: torch.nn.Module) -> int:
    """Put the layers back as they were; how many were packed."""
    packed = [(name, module) for name, module in model.named_modules() if isinstance(module, PackedLinear)]
    if lost := [name for name, module in packed if KEPT not in module.__dict__]:
        raise BadInput(f"{lost[0]} was packed with keep=False, or loaded so: its weight as it was is not here any more")
    for _, module in packed:
        before = module.__dict__[KEPT]
        before.weight.data = before.weight.data.to(module.packed.device, module.scales.dtype)  # as the model is by now
        before.train(module.training)
        _put(model, module, before)
    return len(packed)


def _put(model: torch.nn.Module, before: torch.nn.Module, after: torch.nn.Module) -> None:
    """In the place of another, under every name that it has."""
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is before]
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, after)


def _head(model: torch.nn.Module) -> torch.nn.Module | None:
    found = getattr(model, "get_output_embeddings", lambda: None)()
    return found if isinstance(found, torch.nn.Module) else None


def _outcome(model: torch.nn.Module, batch: Any) -> tuple[float | None, list[torch.Tensor]]:
    """The loss, where there is one, and the outputs: without dropout, and with the statistics of batches left alone."""
    with torch.no_grad(), _evaluating(model):
        if isinstance(batch, Mapping):
            out = model(**batch)
        else:
            out = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    found: list[torch.Tensor] = []

    def gather(x: Any) -> None:
        if isinstance(x, torch.Tensor):
            found.append(x.detach().clone())
        elif isinstance(x, Mapping | tuple | list):
            for each in x.values() if isinstance(x, Mapping) else x:
                gather(each)

    gather(out)
    return (float(loss) if isinstance(loss, torch.Tensor) else None), found


@contextlib.contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _change(before: tuple[float | None, list[torch.Tensor]], after: tuple[float | None, list[torch.Tensor]]) -> str:
    (loss, outputs), (loss_after, outputs_after) = before, after
    if loss is not None and loss_after is not None:
        share = (loss_after - loss) / abs(loss) if loss else math.inf
        return f"loss {loss:.4f} → {loss_after:.4f} ({share:+.2%})"
    off = [
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(outputs_after, outputs, strict=True)
        if b.is_floating_point() and b.norm() > 0
    ]
    return f"outputs change by {max(off):.2%} of their size" if off else "the batch gave nothing to compare"
