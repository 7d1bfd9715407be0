"""The linear layers of anybody's model: which may be replaced, by what, and how they come back.

Only what is known to be a linear layer by its class is taken, and only where nothing hangs on it: no hooks, no
parametrization, no weight that another module shares. The weights as they were stay in the host's memory, so that
`unpatch` gives the model back bit by bit.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sublight.errors import BadInput, nearest
from sublight.fix.compressed import Compressed, Row

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
EXPECTED = {  # of a layer's time, by way: benchmarks/products_h200.json, sparse_and_grouped_h200.json
    "w4a16": "on an H200 a product of one row took 0.43 to 0.58 of bf16's time, of 16 rows 0.69 to 0.75, of 64 no less",
    "2:4": "on an H200 a product of 8192 rows took 0.73 of the dense one's time, of 64 rows twice as long",
}
NOT_MEASURED = "the time was not measured"
KEPT = "_as_it_was"  # the layer before it was replaced
Outcome = tuple[float | None, list[torch.Tensor]]  # the loss, where there is one, and the outputs


def weight_of(module: torch.nn.Module) -> torch.Tensor | None:
    """(out, in) of a layer that is known to be linear, by its class; None of any other."""
    if type(module) is torch.nn.Linear:
        return module.weight
    kind: Any = type(module)
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):  # GPT-2's, which has (in, out)
        return module.weight.T  # type: ignore[union-attr,operator,return-value]
    return None


def replace_layers(
    model: torch.nn.Module,
    *,
    by: Callable[[torch.nn.Module, torch.Tensor], torch.nn.Module],
    why_left: Callable[[torch.Tensor], str],
    words: Callable[[torch.nn.Module], str],
    caller: str,
    how: str,
    verb: str,
    skip: Sequence[str] | None,
    verify: Any,
    keep: bool,
) -> Compressed:
    """Put `by(layer, weight)` in the place of every linear layer that may be replaced. It has `bias`, `nbytes`, `like`,
    a tensor of the device and data type that its weight, made whole, would have, and `is_trained`: its weight is the
    layer's own.

    `why_left` says why a weight is not taken, `words` what was done to a layer. `skip` are names or patterns of layers
    to leave; unless it is given the output head is left, whose error goes straight into the loss.
    """
    skip = (skip,) if isinstance(skip, str) else skip
    check(model, skip, caller)
    before = outcome(model, verify) if verify is not None else None
    shared = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    head = _head(model) if skip is None else None
    rows: dict[tuple[str, str, bool], list[tuple[str, int, int]]] = {}
    for name, module in list(model.named_modules()):
        weight = weight_of(module)
        if weight is None:
            continue
        if any(fnmatch.fnmatch(name, pattern) for pattern in skip or ()):
            reason = "skipped, as asked"
        elif module is head:
            reason = "the output head: its error goes straight into the loss; skip=() takes it, too"
        else:
            reason = why_fixed(module, weight, shared) or why_left(weight)
        before_bytes = after_bytes = weight.nbytes
        is_changed = not reason
        if is_changed:
            new: Any = by(module, weight)
            _swap(model, module, new, keep=keep)
            after_bytes, reason = new.nbytes, words(new)
        rows.setdefault((type(module).__name__, reason, is_changed), []).append((name, before_bytes, after_bytes))
    return Compressed(
        how=how,
        verb=verb,
        rows=tuple(
            Row(
                kind=kind,
                names=tuple(name for name, _, _ in found),
                is_changed=is_changed,
                reason=reason,
                before_bytes=sum(bytes_ for _, bytes_, _ in found),
                after_bytes=sum(bytes_ for _, _, bytes_ in found),
            )
            for (kind, reason, is_changed), found in rows.items()
        ),
        change=change(before, outcome(model, verify)) if before is not None else "",
        is_kept=keep,
        expected=EXPECTED.get(how, NOT_MEASURED),
    )


def check(model: Any, skip: Sequence[str] | None, caller: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise BadInput(f"{caller} takes a torch.nn.Module, not {type(model).__name__}")
    if weight_of(model) is not None:
        raise BadInput("the model is itself a linear layer: wrap it in a torch.nn.Sequential")
    names = {name for name, _ in model.named_modules() if name}
    if not isinstance(skip, Iterable | None):
        raise BadInput(f"skip={skip!r}: a list of layers' names, such as {[next(iter(sorted(names)), '0')]!r}")
    for pattern in skip or ():
        if not isinstance(pattern, str):
            raise BadInput(f"skip={pattern!r}: a layer's name in quotes, such as {next(iter(sorted(names)), '0')!r}")
        if not any(fnmatch.fnmatch(name, pattern) for name in names):
            raise BadInput(f"skip={pattern!r} names no module: {nearest(pattern, sorted(names))}")


def why_fixed(module: torch.nn.Module, weight: torch.Tensor, shared: Mapping[int, int]) -> str:
    """Why nothing may take a layer's place; empty where something may."""
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
    return "" if torch.isfinite(weight).all() else "its weight has values that are not finite"


def _swap(model: torch.nn.Module, module: torch.nn.Module, new: Any, *, keep: bool) -> None:
    new.train(module.training)
    put(model, module, new)
    if keep:
        own: Any = module.weight
        new.__dict__[KEPT] = module
        if not new.is_trained:
            own.data = own.data.cpu()


def restore_layers(model: torch.nn.Module, kinds: tuple[type[torch.nn.Module], ...]) -> int:
    """Put the layers back as they were; how many had been replaced."""
    replaced: list[tuple[str, Any]] = [(name, each) for name, each in model.named_modules() if isinstance(each, kinds)]
    if lost := [name for name, module in replaced if KEPT not in module.__dict__]:
        raise BadInput(f"{lost[0]} was packed with keep=False, or loaded so: its weight as it was is not here any more")
    for _, module in replaced:
        before = module.__dict__[KEPT]
        before.bias = module.bias  # which load_state_dict(…, assign=True) puts another in the place of
        if module.is_trained:
            before.weight = module.weight
        before.weight.data = before.weight.data.to(module.like.device, module.like.dtype)  # as the model is by now
        before.train(module.training)
        put(model, module, before)
    return len(replaced)


def put(model: torch.nn.Module, before: torch.nn.Module, after: torch.nn.Module) -> None:
    """Put a module in the place of another, under every name that it has."""
    names = [name for name, module in model.named_modules(remove_duplicate=False) if module is before]
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, after)


def _head(model: torch.nn.Module) -> torch.nn.Module | None:
    found = getattr(model, "get_output_embeddings", lambda: None)()
    return found if isinstance(found, torch.nn.Module) else None


def outcome(model: torch.nn.Module, batch: Any) -> Outcome:
    """What a batch gives (a tensor, a tuple or a mapping of the model's arguments): without dropout, and with the
    statistics of batches left alone."""
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


def change(before: Outcome, after: Outcome) -> str:
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
