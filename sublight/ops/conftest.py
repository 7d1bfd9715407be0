"""Triton's interpreter at several times its speed, with the same results: tests of the ops spend their time in it.

For every call of a device function, in every program, it looks through its language for what there is to replace, finds
what it has replaced already, and replaces nothing: once a launch is enough. And it reduces by exclusive or, of which
flips and sorts are made, one element at a time in Python. Where a version of Triton is built otherwise, all stays as it
is.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterator
from typing import Any

import pytest

NEEDED = ("_patch_lang", "_LangPatchScope", "GridExecutor", "ReduceOps")


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1":
            interpreter = pytest.importorskip("triton.runtime.interpreter")
            if all(hasattr(interpreter, name) for name in NEEDED):
                look_up_once_a_launch(interpreter, patch)
                reduce_by_numpy(interpreter, patch)
        yield


def look_up_once_a_launch(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    look_up, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[tuple[str, ...]] = set()  # in this launch

    @functools.cache
    def languages(function: Any) -> tuple[str, ...]:
        """The modules of Triton's language that a function sees: what is replaced is replaced in them."""
        modules = (value.__name__ for value in function.__globals__.values() if inspect.ismodule(value))
        return tuple(sorted(name for name in modules if name.startswith("triton.language")))

    def look_up_once(function: Any) -> Any:
        if languages(function) in replaced:
            return interpreter._LangPatchScope()  # nothing to put back
        replaced.add(languages(function))
        return look_up(function)

    def launch_afresh(self: Any, *args: Any, **options: Any) -> None:
        replaced.clear()  # the end of a launch puts everything back
        launch(self, *args, **options)

    patch.setattr(interpreter, "_patch_lang", look_up_once)
    patch.setattr(interpreter.GridExecutor, "__call__", launch_afresh)


def reduce_by_numpy(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    import numpy as np
    from triton.language import standard

    reduce = interpreter.ReduceOps.apply_impl
    reduce_by_xor: Any = np.bitwise_xor.reduce

    def quick_reduce(self: Any, values: tuple[Any, ...]) -> Any:
        if self.combine_fn is not standard._xor_combine or self.axis is None:
            return reduce(self, values)
        (x,) = values
        result = reduce_by_xor(x.handle.data, axis=int(self.axis), keepdims=bool(self.keep_dims))
        return self.to_tensor(result, x.dtype)

    patch.setattr(interpreter.ReduceOps, "apply_impl", quick_reduce)
