"""Plans by what tells calls apart: the first call of a kind decides, later ones look it up.

The key of a call holds, of each tensor, all that a plan may depend on: class, shape, strides, data type, device, how
far it lies from a 16-byte boundary (all that Triton asks of an address), lazy negation, whether it wants a gradient; of
everything else its value and type. It is computed at every call, so the function that does it is written out for the
arguments of its op: half a microsecond less than a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from sublight.backend.state import PLAIN

MOST_KNOWN = 4096  # plans of an op; then they are made anew
Key = Callable[..., Hashable | None]
_OF_TENSOR = (
    "{0}.__class__, {0}.shape, {0}.stride(), {0}.dtype, {0}.get_device(), {0}.data_ptr() & 15, {0}.requires_grad, "
    "{0}.is_neg()"
)


def key_function(
    names: Sequence[str],
    tensors: frozenset[str],
    lists: frozenset[str] = frozenset(),
    free: frozenset[str] = frozenset(),
) -> Key:
    """The key of a call with these arguments; None where a tensor is of a class of its own: such calls have no plan.

    `lists` are arguments that are lists of numbers; of `free` ones no plan depends on the value.

    >>> key = key_function(("x", "eps"), frozenset(("x",)))
    >>> x, y = torch.ones(2, 3), torch.zeros(2, 3)
    >>> key(x, 1.0) == key(y, 1.0), key(x, 1) == key(x, 1.0), key(x, 1.0) == key(x.T, 1.0)
    (True, False, False)
    """
    checks = " and ".join(f"({name} is None or {name}.__class__ in PLAIN)" for name in names if name in tensors)
    parts = []
    for name in names:
        if name in tensors:
            parts.append(f"({_OF_TENSOR.format(name)}) if {name} is not None else None")
        elif name in lists:
            parts.append(f"tuple({name})")
        elif name not in free:
            parts.append(f"{name}, {name}.__class__")
    source = (
        f"def key({', '.join(names)}):\n"
        f"    if {checks or 'True'}:\n"
        f"        return ({', '.join(parts)}, grad_enabled())\n"
        "    return None\n"
    )
    namespace: dict[str, Any] = {"PLAIN": PLAIN, "grad_enabled": torch.is_grad_enabled}
    exec(source, namespace)
    return namespace["key"]  # type: ignore[no-any-return]


def remember(plans: dict[Hashable, Any], key: Hashable, plan: Any) -> None:
    if len(plans) >= MOST_KNOWN:
        plans.clear()
    plans[key] = plan
