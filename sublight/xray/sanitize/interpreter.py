"""Triton's interpreter under watch: its launches, loads, stores and atomics go through ours.

`Session` is one script's run. The interpreter's classes are patched once for the process, which exists for this alone;
the patches ask `Watch` which session and which launch is on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import operator
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from sublight.backend import private
from sublight.xray.record import Place
from sublight.xray.sanitize import folds
from sublight.xray.sanitize import libdevice as sanitize_libdevice
from sublight.xray.sanitize.accesses import Accesses
from sublight.xray.sanitize.at import Enough, Pretended, ends_of, pretend
from sublight.xray.sanitize.bf16 import Right
from sublight.xray.sanitize.launch import Launch
from sublight.xray.sanitize.memory import Argument, Memory
from sublight.xray.sanitize.notes import Notes, Stack
from sublight.xray.sanitize.offset import Offsets
from sublight.xray.sanitize.order import LockKept
from sublight.xray.sanitize.padding import Padding, quiet
from sublight.xray.sanitize.sample import Drawn, Index, Sample, Written
from sublight.xray.sanitize.tuned import Tuned, changed_again, kept
from sublight.xray.sanitize.undefined import Lanes

DEPENDS = "uninitialised-read"  # in a sample: another program, which may not have run, writes what this one reads


@dataclass(slots=True)
class Session:
    """What one script did."""

    at: Mapping[str, int]
    notes: Notes = field(default_factory=Notes)
    memory: Memory = field(init=False)
    launches: int = 0
    kernels: dict[str, Any] = field(default_factory=dict)  # a specialisation's key -> how to compile it
    names: dict[str, None] = field(default_factory=dict)  # of kernels, in the order of their launches
    arguments: dict[str, None] = field(default_factory=dict)  # names that --at could have used
    replaced: set[str] = field(default_factory=set)  # names of --at that some launch had
    pretended: set[str] = field(default_factory=set)  # kernels that were run at pretended sizes
    tuned: dict[Any, Tuned] = field(default_factory=dict)  # by function: autotune would have tried it just now
    sample: Sample | None = None  # of each launch only some programs; None: all of them
    written: dict[int, list[Written]] = field(default_factory=dict)  # by a storage's address, an entry for each launch
    on_launch: Callable[[Any, tuple[int, ...], Mapping[str, Any]], None] | None = None  # kernel, grid, arguments
    has_atomics: bool = False  # some program added to what others may add to, too

    def __post_init__(self) -> None:
        self.memory = Memory(self.notes)

    def forget(self) -> None:
        """Begin anew in a process that was forked; what is known of memory stays."""
        self.notes.by_place.clear()
        self.kernels.clear()
        self.launches = 0

    def programs(self, shape: Index) -> Iterable[Index]:
        """The programs of a launch that are run."""
        if self.sample:
            return Drawn(shape, self.sample)
        return list(itertools.product(range(shape[0]), range(shape[1]), range(shape[2])))

    def has_shown_enough(self, launch: Launch) -> bool:
        """A sample ends where programs read or add to what others write: it cannot tell then what is right."""
        return self.sample is not None and (launch.has_atomics or self.has_atomics or self.notes.has(DEPENDS))

    def count(self, launch: Launch, total: int, ran: int) -> None:
        """What a launch has stored, program by program."""
        self.has_atomics = self.has_atomics or launch.has_atomics
        for address, lanes in launch.stored_lanes.items():
            counts = tuple(lanes.get(program, 0) for program in range(ran))
            self.written.setdefault(address, []).append(Written(total=total, counts=counts))

    def results(self) -> tuple[Any, ...]:
        """What `add_results` takes in another process."""
        return self.notes.findings(), self.launches, self.kernels, self.names, self.arguments, self.replaced

    def add_results(self, results: tuple[Any, ...]) -> None:
        findings, launches, kernels, names, arguments, replaced = results
        for finding in findings:
            self.notes.add(
                finding.id, finding.kernel, finding.place, finding.detail, is_information=finding.is_information
            )
        self.launches += launches
        self.kernels |= kernels
        self.names |= names
        self.arguments |= arguments
        self.replaced |= replaced


@dataclass(slots=True)
class Watch:
    """The patches' view of the present: the session, and the launch where one is on."""

    stack: Stack
    describe: Callable[[Any, dict[str, Any], dict[str, Any]], tuple[str, Any] | None]
    session: Session | None = None
    launch: Launch | None = None
    patch_language: Callable[[Any], Any] = lambda fn: None
    patched: set[Any] = field(default_factory=set)  # helpers of the launch that is on, whose language is interpreted
    turn: Any = field(default_factory=threading.RLock)  # one launch at a time, whatever thread makes it

    def note(self, id: str, place: Place, detail: str) -> None:
        if self.launch:
            self.launch.notes.add(id, self.launch.kernel, place, detail)

    def install(self) -> None:
        interpreter = private.interpreter

        builder = interpreter.InterpreterBuilder
        folds.install(interpreter)
        Right(interpreter, self.stack.instruction, self.note).install(builder)
        Offsets(interpreter, self.stack.place).install(builder)
        lanes = Lanes(interpreter, self.stack.place, self.note)
        lanes.install(builder)
        padding = Padding(interpreter, self.stack.place, self.note, lambda: quiet(self))
        padding.install(builder)
        Accesses(interpreter, lambda: self.launch, self.stack.place, lanes, padding).install(builder)
        sanitize_libdevice.install(interpreter)
        # Triton checks every sum by a second one in 64 bits, and throws the answer away outside of debug mode
        options = interpreter.interpreter_builder.options
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)

        def run(jit: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
            if not warmup:
                with self.turn:
                    _Run(self, interpreter, jit).launch(grid, args, kwargs)
            return Compiled(jit, kwargs.get("num_warps", 4))

        interpreter.InterpretedFunction.run = run
        self._share_what_is_repeated(interpreter)

    def _share_what_is_repeated(self, interpreter: Any) -> None:
        """Triton looks through its whole language for every call of a function inside of a kernel (tl.sum is one), and
        makes a table of data types for every value: together a third of all time. Once a launch, and once a type."""
        tl, dtype_of = interpreter.tl, functools.cache(interpreter._get_np_dtype)
        self.patch_language = interpreter._patch_lang

        def patch_once(fn: Any) -> Any:
            if fn not in self.patched:
                self.patched.add(fn)
                self.patch_language(fn)

        def numpy_dtype(kind: Any) -> np.dtype[Any]:
            kind = kind.element_ty if isinstance(kind, tl.block_type) else kind
            return np.dtype(np.uint64) if isinstance(kind, tl.pointer_type) else dtype_of(kind)

        interpreter._patch_lang = patch_once
        interpreter._get_np_dtype = numpy_dtype


class Compiled:
    """In place of the compiled kernel that a launch gives back: scripts ask for its registers, and launch it again.

    They divide by what they get, so that nothing is zero.
    """

    n_regs, n_spills, n_max_threads = 32, 0, 1024

    def __init__(self, jit: Any, num_warps: int) -> None:
        self.jit, self.name = jit, jit.__name__
        self.metadata = SimpleNamespace(shared=1024, num_warps=num_warps, num_stages=1, name=self.name)
        self.asm: dict[str, str] = defaultdict(str)

    def _init_handles(self) -> None: ...

    def result(self) -> Compiled:
        return self

    def __getitem__(self, grid: Any) -> Any:
        return self.jit[grid]


@dataclass(slots=True)
class _Run:
    """One call of kernel[grid](...)."""

    watch: Watch
    interpreter: Any
    jit: Any
    warps: int = 4

    def launch(self, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        session = self.watch.session
        assert session is not None
        session.memory.sweep()
        fn = self.jit.rewrite()
        spec = inspect.getfullargspec(fn)
        options = {name: value for name, value in kwargs.items() if name not in (*spec.args, *spec.kwonlyargs)}
        kwargs = {name: value for name, value in kwargs.items() if name not in options}
        for hook in self.jit.pre_run_hooks:
            hook(*args, **kwargs)
        bound = inspect.getcallargs(fn, *args, **kwargs)
        annotations = inspect.get_annotations(self.jit.fn)  # Triton's interpreter knows them by the name tl alone
        constants = [name for name, kind in annotations.items() if "constexpr" in str(kind)]
        size = grid(bound) if callable(grid) else grid
        size = tuple(
            operator.index(n) for n in (size if isinstance(size, tuple | list) else (size,))
        )  # no 2.5 programs
        shape = (*size, 1, 1, 1)[:3]
        session.launches += 1
        session.names[self.jit.__name__] = None
        if session.on_launch:
            session.on_launch(self.jit, shape, bound)
        session.arguments.update(dict.fromkeys(name for name, value in bound.items() if type(value) is int))
        if described := self.watch.describe(self.jit, bound, options):
            session.kernels.setdefault(*described)
        else:
            detail = "whether the compiler takes it was not asked: an argument is a tuple of numbers, or cannot be sent"
            session.notes.add("not-compiled", self.jit.__name__, None, detail, is_information=True)
        self.warps = options.get("num_warps") or bound.get("num_warps") or 4
        programs = session.programs(shape)
        tuned = session.tuned.pop(self.jit.fn, None)
        before = kept(session.memory, bound, tuned.restored) if tuned else {}
        arguments = self._execute(fn, bound, constants, shape, iter(programs))
        if tuned and not tuned.has_hooks:
            again = lambda: self._execute(fn, bound, constants, shape, iter(programs), is_muted=True)  # noqa: E731
            for argument, detail in changed_again(arguments, before, tuned.restored, again):
                session.notes.add("autotuned-in-place", self.jit.__name__, argument.stored_at, detail)
        if session.at and self.jit.__name__ not in session.pretended:
            self._execute_at(session, fn, bound, constants, shape)

    def _execute_at(
        self, session: Session, fn: Any, bound: dict[str, Any], constants: list[str], shape: tuple[int, int, int]
    ) -> None:
        """The same launch at the sizes of --at: the last programs only, and no memory behind it."""
        plan = pretend(bound, constants, shape, session.at)
        if plan is None:
            return
        session.replaced |= plan.names
        session.pretended.add(self.jit.__name__)
        with contextlib.suppress(Exception):  # values of memory are made up here, so the kernel may trip over them
            self._execute(fn, plan.arguments, constants, plan.grid, plan.programs(), plan)

    def _execute(
        self,
        fn: Any,
        bound: dict[str, Any],
        constants: list[str],
        shape: tuple[int, int, int],
        programs: Iterator[tuple[int, int, int]],
        plan: Pretended | None = None,
        *,
        is_muted: bool = False,
    ) -> list[Argument]:
        """Run these programs; the tensors that they got."""
        watch, interpreter = self.watch, self.interpreter
        assert watch.session is not None
        launch = Launch(
            self.jit.__name__,
            Notes() if is_muted else watch.session.notes,
            watch.session.memory,
            (1, 1, 1) if plan else shape,
            is_virtual=plan is not None,
            has_many_warps=self.warps > 1,
        )
        scope = watch.patch_language(fn)
        watch.patched.clear()  # the last launch has put the language back
        watch.launch, outer = launch, watch.launch
        loops = fn.__globals__.get("range")
        if plan:
            loops_of_this = ends_of(interpreter, watch.note)
            fn.__globals__["range"] = loops_of_this
            scope.set_attr(interpreter.tl, "range", loops_of_this)
        try:
            args = {
                name: value if name in constants else self._converted(launch, name, value)
                for name, value in bound.items()
            }
            builder = interpreter.interpreter_builder
            builder.set_grid_dim(*shape)
            ran = 0
            for number, index in enumerate(programs):
                if watch.session.has_shown_enough(launch):
                    break
                builder.set_grid_idx(*index)
                launch.begin(0 if plan else number, index)
                fn(**args)
                ran += 1
            launch.end()
            if plan is None:
                watch.session.count(launch, math.prod(shape), ran)
        except Enough:
            pass
        except LockKept as error:
            watch.note("lock-kept", self.watch.stack.place_of(error) or Place(file="?", line=0), str(error))
            raise interpreter.InterpreterError(repr(error)) from error
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error
        finally:
            watch.launch = outer
            scope.restore()
            if plan and loops is None:
                del fn.__globals__["range"]
            elif plan:
                fn.__globals__["range"] = loops
            for argument in launch.arguments:
                argument.storage.forget_marks()
                argument.storage.settle()
        return launch.arguments

    def _converted(self, launch: Launch, name: str, value: Any) -> Any:
        """An argument as the kernel sees it; as the interpreter does it, but for the addresses."""
        interpreter, tl = self.interpreter, self.interpreter.tl
        if isinstance(value, tuple):
            parts = [self._converted(launch, f"{name}[{i}]", part) for i, part in enumerate(value)]
            return interpreter._tuple_create(value, parts)
        if isinstance(value, interpreter.TensorDescriptor):
            strides = [interpreter._implicit_cvt(stride) for stride in value.strides]
            strides[-1] = tl.constexpr(1)
            made = interpreter.interpreter_semantic.make_tensor_descriptor(
                base=self._converted(launch, name, value.base),
                shape=[interpreter._implicit_cvt(size) for size in value.shape],
                strides=strides,
                block_shape=[tl.constexpr(size) for size in value.block_shape],
                padding_option=value.padding,
            )
            if hasattr(value, "round_f32_to_tf32"):
                made.handle.round_f32_to_tf32 = value.round_f32_to_tf32
            return made
        if hasattr(value, "data_ptr"):
            kind = tl.str_to_ty(private.mangle_type(value), None)
            address = launch.pointer(name, interpreter._unwrap_tensor(value))
            return tl.tensor(interpreter.TensorHandle(np.array([address], np.uint64), kind), kind)
        if type(value) is int:  # the interpreter keeps numbers from 2**31 on in 32 bits
            kind = tl.str_to_ty(private.mangle_type(value), None)
            data = np.array([value], interpreter._get_np_dtype(kind))
            return tl.tensor(interpreter.TensorHandle(data, kind), kind)
        if type(value) is float:  # the interpreter leaves it a constant, which would take on the other side's type
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return interpreter._implicit_cvt(value)
