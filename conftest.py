"""The process that tests share: each leaves it as it was, and Triton's interpreter is several times as quick in it.

What a test leaves behind fails another one, in some orders. The interpreter's results stay the same: for every call of
a device function, in every program, it looks through its language for what there is to replace, finds what it has
replaced already, and replaces nothing: once a launch is enough. And it reduces by exclusive or, of which flips and
sorts are made, one element at a time in Python. Where a version of Triton is built otherwise, all stays as it is.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

VARIABLES = ("TRITON_INTERPRET", "COLUMNS", "NO_COLOR", "PYTHONPATH", "HOME", "PATH", "RANK", "WORLD_SIZE")
NEEDED = ("_patch_lang", "_LangPatchScope", "GridExecutor", "ReduceOps")


@pytest.fixture(autouse=True)
def leaves_its_process_alone() -> Iterator[None]:
    yield from _as_before()


@pytest.fixture(autouse=True, scope="module")
def module_leaves_its_process_alone() -> Iterator[None]:
    """What fixtures of the module change, too."""
    yield from _as_before()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny products: threads that wait for each other take ten times as long."""
    torch = importlib.import_module("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _as_before() -> Iterator[None]:
    before = _state()
    yield
    after = _state()
    changed = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert not changed, f"left behind in the process, before and after: {changed}"


def _state() -> dict[str, object]:
    state: dict[str, object] = {
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "sys.argv": list(sys.argv),
        "working folder": os.getcwd(),
        "SIGINT": signal.getsignal(signal.SIGINT),
        "SIGTERM": signal.getsignal(signal.SIGTERM),
        "garbage collector": gc.isenabled(),
        "sys.getprofile": sys.getprofile(),
        "sys.gettrace": sys.gettrace(),
        "recursion limit": max(sys.getrecursionlimit(), 2000),  # PyTorch's compiler raises it to that, and leaves it
        **{name: os.environ.get(name) for name in VARIABLES},
    }
    if torch := sys.modules.get("torch"):
        state |= {
            "default dtype": torch.get_default_dtype(),
            "default device": torch.get_default_device(),
            "threads": torch.get_num_threads(),
            "grad": torch.is_grad_enabled(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "TF32": torch.backends.cuda.matmul.allow_tf32,
            "process group": torch.distributed.is_available() and torch.distributed.is_initialized(),
        }
    if language := sys.modules.get("triton.language"):  # the interpreter puts its own functions there for a launch
        state |= {"tl.arange": language.arange, "tl.core.mul": language.core.mul, "__mul__": language.tensor.__mul__}
    return state


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
            interpreter = importlib.import_module("triton.runtime.interpreter")
            if all(hasattr(interpreter, name) for name in NEEDED):
                look_up_once_a_launch(interpreter, patch)
                reduce_by_numpy(interpreter, patch)
        yield


def look_up_once_a_launch(interpreter: Any, patch: pytest.MonkeyPatch) -> None:
    look_up, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: dict[tuple[str, ...], Any] = {}  # in this launch: what each set of modules held before

    @functools.cache
    def languages(function: Any) -> tuple[str, ...]:
        """The modules of Triton's language that a function sees: what is replaced is replaced in them."""
        modules = (value.__name__ for value in function.__globals__.values() if inspect.ismodule(value))
        return tuple(sorted(name for name in modules if name.startswith("triton.language")))

    def look_up_once(function: Any) -> Any:
        scope = interpreter._LangPatchScope()
        if languages(function) not in replaced:
            scope = replaced[languages(function)] = look_up(function)
            if len(replaced) == 1:  # the kernel's own, which the end of the launch puts back
                scope.restore = put_back
        return scope

    def put_back() -> None:
        """Also what the kernel's helpers replaced, which Triton leaves: nothing would compile here after it."""
        while replaced:
            _, scope = replaced.popitem()
            type(scope).restore(scope)

    def launch_afresh(self: Any, *args: Any, **options: Any) -> None:
        put_back()  # of a function that was called outside of a launch
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
