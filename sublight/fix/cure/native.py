"""Name what compiled code would write outside of the scratch copy, where that code is called from Python.

`torch.save` and safetensors open their files without Python: the fence's hook does not hear of it, and where the kernel
refuses it, its error names no file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any


def guard(check: Callable[[Any], None]) -> None:
    """`check` gets the file before it is written, for the rest of the process."""
    import torch

    torch.save = _checking(torch.save, check)
    torch.jit.save = _checking(torch.jit.save, check)
    with contextlib.suppress(ImportError):
        import safetensors
        import safetensors.torch

        checked = _checking(safetensors.serialize_file, check)
        for home in (safetensors, safetensors.torch):
            vars(home)["serialize_file"] = checked


def _checking(write: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    """A writer whose second argument is a file, by whatever name."""

    def checked(data: Any, file: Any = None, *args: Any, **kwargs: Any) -> Any:
        names = [name for name in ("f", "filename") if name in kwargs]
        check(kwargs[names[0]] if names else file)
        return write(data, **kwargs) if names else write(data, file, *args, **kwargs)

    return checked
