"""Launches that reuse what Triton worked out at the first one: which compiled kernel, which arguments.

A plan knows a launch's grid, numbers and constants before the tensors are there: that is a `Step`. Its first call goes
through Triton's public `kernel[grid](…)`, 15 to 25 µs on an H200's host. Later ones hand the tensors' addresses to the
C function behind it, 4 to 5 µs. That function is private to Triton, and differs between its versions: before the first
quick launch a small kernel is launched so and its result looked at. Where anything is not as expected every launch
takes the public way, `why_slow()` says why, and `sublight doctor` shows it.

A step is good for tensors of one kind: whoever keeps it (`ops/record/plans.py`) has a key that tells data types,
shapes, strides and alignment apart. `CHECKED` makes every launch look whether that is so; tests set it.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from sublight.backend import listen, native, private
from sublight.backend.device import is_interpreted

Quick = Callable[[tuple[Any, ...], tuple[float, ...]], bool]  # False: not launched, since a listener must see it
CHECKED: ContextVar[bool] = ContextVar("CHECKED", default=False)
WATCHERS: list[list[Step]] = []  # lists that every step taken is appended to
_INTERPRETER = threading.RLock()  # Triton's interpreter keeps the current program in a global of the process


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as Hopper's copy engine sees it: sizes, strides, and the block that one copy brings in."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements; the last is 1
    block: tuple[int, ...]
    layout: Any = None  # the block's layout in shared memory, for kernels written in Gluon

    def of(self, x: Any) -> Any:
        shape, strides, block = list(self.shape), list(self.strides), list(self.block)
        if self.layout is not None:
            return private.GluonDescriptor(x, shape, strides, block, self.layout)
        return private.TensorDescriptor(x, shape, strides, block)


class Step:
    """One launch that lacks only its tensors: kernel, grid, the numbers behind the pointers, and the constants.

    `on` names the tensors, in the order of the kernel's pointers, separated by spaces. A name among the numbers stands
    for an argument of the call whose value is free: the plan does not depend on it, nor may the compiled kernel, which
    therefore has it as a float, or as an integer that Triton does not specialise, with its type annotated. `views` are
    the tensors, by their place, that the kernel gets as descriptors for the copy engine instead of as pointers.
    """

    __slots__ = (
        *("_kinds", "_quick", "compiled", "constants", "free", "grid", "kernel", "numbers", "on", "tile", "views"),
    )

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        *numbers: float | str,
        on: str = "",
        views: Any = None,
        tile: Any = None,
        **constants: Any,
    ) -> None:
        self.views = views or {}
        self.kernel, self.grid, self.numbers, self.constants, self.tile = kernel, grid, numbers, constants, tile
        self.on = tuple(on.split())
        self.free = tuple(number for number in numbers if isinstance(number, str))
        self.compiled: Any = None  # Triton's compiled kernel, once it was launched
        self._quick: Quick | None = None
        self._kinds: Any = None  # the arguments' types at the first launch, kept where `CHECKED` compares later ones

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def __repr__(self) -> str:
        return f"Step({self.name}, grid={self.grid}, {self.numbers}, {self.constants})"

    def __call__(self, *tensors: Any, free: tuple[float, ...] = ()) -> None:
        """Launch on the current device and stream; the tensors are the kernel's pointers, `free` the values of the
        numbers that go by a name, all in their order."""
        quick = self._quick
        if quick is None or WATCHERS or CHECKED.get() or not quick(tensors, free):
            self._launch(tensors, free)

    def _launch(self, tensors: tuple[Any, ...], free: tuple[float, ...]) -> None:
        for steps in WATCHERS:
            steps.append(self)
        if CHECKED.get():
            self._check(tensors)
        if self.views:
            views = self.views
            tensors = tuple([views[at].of(x) if at in views else x for at, x in enumerate(tensors)])
        with _INTERPRETER if is_interpreted() else contextlib.nullcontext():
            compiled = self.kernel[self.grid](*tensors, *self.values(free), **self.constants)
        is_real = compiled is not None and not is_interpreted() and not listen.LISTENERS  # a listener may only compile
        if self._quick is None and is_real:
            self.compiled = compiled
            self._quick = _Route.quick(self, compiled, len(tensors))

    def values(self, free: tuple[float, ...]) -> tuple[float, ...]:
        """The step's numbers; each name among them is replaced by its value from `free`."""
        values = iter(free)
        return tuple([next(values) if isinstance(number, str) else number for number in self.numbers])

    def _check(self, tensors: tuple[Any, ...]) -> None:
        """Fail where these tensors are of another kind than the first launch's, which the kernel was compiled for."""
        kinds = tuple((x.dtype, x.data_ptr() % 16 == 0) for x in tensors)
        if self._kinds not in (None, kinds):
            raise AssertionError(f"{self!r} was planned for {self._kinds}, and launched on {kinds}")
        self._kinds = kinds


@contextlib.contextmanager
def watching() -> Iterator[list[Step]]:
    """Collect the steps that are taken inside the block, compiled or interpreted."""
    steps: list[Step] = []
    WATCHERS.append(steps)
    try:
        with native.paused():
            yield steps
    finally:
        WATCHERS[:] = [other for other in WATCHERS if other is not steps]


def why_slow() -> str:
    """Why launches go through Triton's public way; empty where they do not, or before the first launch."""
    return _Route.reason


class _Route:
    """Whether launches may use Triton's C launcher: not tried yet, tried and right, or not to be used, and why."""

    checked = False
    reason = ""
    _lock = threading.Lock()

    @classmethod
    def quick(cls, step: Step, compiled: Any, pointers: int) -> Quick | None:
        if not cls.checked:
            cls.try_out()
        if cls.reason or not cls.checked:
            return None
        try:
            return quick_launch(compiled, step, pointers)
        except Exception as error:  # these are private parts: any exception means that this Triton has changed them
            cls.give_up(error)
            return None

    @classmethod
    def try_out(cls) -> None:
        """Launch a small kernel the quick way and look at what it wrote; not while a graph is captured."""
        import torch

        with cls._lock:
            if cls.checked or torch.cuda.is_current_stream_capturing():
                return
            try:
                # in a thread of its own: a mode or profiler that watches this one does not see our kernel and our reads
                with ThreadPoolExecutor(1) as apart:
                    apart.submit(self_check, torch.cuda.current_device() if torch.cuda.is_available() else 0).result()
            except Exception as error:
                cls.give_up(error)
            cls.checked = True

    @classmethod
    def give_up(cls, error: Exception) -> None:
        cls.checked = True
        cls.reason = f"triton's launcher is not as expected ({type(error).__name__}: {error}): launches take 15 µs more"
        warnings.warn(f"sublight: {cls.reason}", RuntimeWarning, stacklevel=2)


def self_check(index: int) -> None:
    """One launch by Triton's public way, the same the quick way, on other tensors: both must give the same numbers."""
    import torch

    from sublight.backend.self_check import _axpy_kernel

    torch.cuda.set_device(index)  # the current device is per thread
    x = torch.arange(100, device="cuda", dtype=torch.float32)
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    step = Step(_axpy_kernel, (1,), 99, 0.5, BLOCK=128)
    compiled = _axpy_kernel[step.grid](x, first, *step.values(()), **step.constants)
    quick = quick_launch(compiled, step, 2)
    expected = torch.where(x < 99, x * 0.5, 0.0)
    if quick is None or not quick((x, second), ()):
        raise RuntimeError("no quick launch of a plain kernel")
    if not torch.equal(first, expected) or not torch.equal(second, expected):
        raise RuntimeError(f"a trial launch gave {second[:3].tolist()}…, not {expected[:3].tolist()}…")


def quick_launch(compiled: Any, step: Step, pointers: int) -> Quick | None:
    """The launch of a compiled kernel as a call of Triton's C function; None where it needs more than that."""
    from triton import knobs
    from triton.runtime.jit import JITFunction

    launcher = compiled.run  # triton.backends.nvidia.driver.CudaLauncher
    if launcher.global_scratch_size or launcher.profile_scratch_size or compiled.metadata.tensordesc_meta:
        return None
    if any(parameter.is_constexpr for parameter in step.kernel.params[:pointers]):
        raise TypeError(f"{step.name} has a constant among its pointers")
    launch, function, metadata = launcher.launch, compiled.function, compiled.packed_metadata
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
    across, down, deep = (*step.grid, 1, 1)[:3]
    named = dict(step.constants)
    constants = [named.get(p.name, p.default) for p in step.kernel.params[pointers + len(step.numbers) :]]
    rest = (*step.numbers, *constants)
    has_free = bool(step.free)
    runtime, theirs, stream_of = knobs.runtime, JITFunction.run, private.current_raw_stream

    def is_watched() -> bool:
        """Whether launches are intercepted (`listen`), or Triton's hooks are set, as its profiler sets them."""
        return JITFunction.run is not theirs or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls

    if not hasattr(launcher, "arg_annotations"):  # up to Triton 3.6 a C function for each signature

        def quick(tensors: tuple[Any, ...], free: tuple[float, ...]) -> bool:
            if is_watched():
                return False
            numbers = (*step.values(free), *constants) if has_free else rest
            launch(
                across, down, deep, stream_of(tensors[0].get_device()), function, cooperative, dependent, None, None,
                metadata, None, None, None, *[x.data_ptr() for x in tensors], *numbers,
            )  # fmt: skip
            return True

        return quick
    annotations, signature = launcher.arg_annotations, launcher.kernel_signature

    def quick_by_signature(tensors: tuple[Any, ...], free: tuple[float, ...]) -> bool:
        if is_watched():
            return False
        numbers = (*step.values(free), *constants) if has_free else rest
        launch(
            across, down, deep, stream_of(tensors[0].get_device()), function, cooperative, dependent, metadata, None,
            None, None, None, None, annotations, signature, (*[x.data_ptr() for x in tensors], *numbers),
        )  # fmt: skip
        return True

    return quick_by_signature


def is_ours(kernel: Any) -> bool:
    return str(getattr(kernel, "__module__", "")).startswith("sublight.")
