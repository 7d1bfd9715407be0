"""Attributes of somebody else's module or class, replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the owner has these attributes; afterwards its own again.

    >>> import types
    >>> module = types.SimpleNamespace(a=1)
    >>> with replaced(module, {"a": 2, "b": 3}):
    ...     print(module.a, module.b)
    2 3
    >>> module
    namespace(a=1)
    """
    kept = {name: vars(owner).get(name, _ABSENT) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
