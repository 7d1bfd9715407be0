"""Triton's interpreter under watch: its launches, loads, stores and atomics go through ours.

`Session` is one script's run. The interpreter's classes are patched once for the process, which exists for this alone;
the patches ask `Watch` which session and which launch is on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from sublight.backend import private
from sublight.xray.record import Place
from sublight.xray.sanitize import libdevice as sanitize_libdevice
from sublight.xray.sanitize.at import Pretended, ends_of, pretend
from sublight.xray.sanitize.bf16 import Right
from sublight.xray.sanitize.launch import Enough, Kind, Launch
from sublight.xray.sanitize.memory import Array, Memory
from sublight.xray.sanitize.notes import Notes, Stack
from sublight.xray.sanitize.offset import Offsets


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

    def __post_init__(self) -> None:
        self.memory = Memory(self.notes)

    def forget(self) -> None:
        """Begin anew in a process that was forked; what is known of memory stays."""
        self.notes.found.clear()
        self.kernels.clear()
        self.launches = 0

    def told(self) -> tuple[Any, ...]:
        """What `hear` takes in another process."""
        return self.notes.findings(), self.launches, self.kernels, self.names, self.arguments, self.replaced

    def hear(self, told: tuple[Any, ...]) -> None:
        findings, launches, kernels, names, arguments, replaced = told
        for found in findings:
            self.notes.add(found.id, found.kernel, found.place, found.detail, is_information=found.is_information)
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
    turn: Any = field(default_factory=threading.RLock)  # one launch at a time, whatever thread makes it

    def note(self, id: str, place: Place, detail: str) -> None:
        if self.session and self.launch:
            self.session.notes.add(id, self.launch.kernel, place, detail)

    def install(self) -> None:
        interpreter = private.interpreter

        builder = interpreter.InterpreterBuilder
        Right(interpreter, self.stack.instruction, self.note).install(builder)
        Offsets(interpreter, self.stack.place).install(builder)
        _Accesses(self, interpreter).install(builder)
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
        constants = self.interpreter.GridExecutor(fn, self.jit.arg_names, grid).constexprs
        size = grid(bound) if callable(grid) else grid
        size = tuple(int(n) for n in (size if isinstance(size, tuple | list) else (size,)))
        shape = (*size, 1, 1, 1)[:3]
        session.launches += 1
        session.names[self.jit.__name__] = None
        session.arguments.update(dict.fromkeys(name for name, value in bound.items() if type(value) is int))
        if described := self.watch.describe(self.jit, bound, options):
            session.kernels.setdefault(*described)
        else:
            detail = "whether the compiler takes it was not asked: an argument is a tuple of numbers, or cannot be sent"
            session.notes.add("not-compiled", self.jit.__name__, None, detail, is_information=True)
        self._execute(fn, bound, constants, shape, itertools.product(range(shape[0]), range(shape[1]), range(shape[2])))
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
    ) -> None:
        watch, interpreter = self.watch, self.interpreter
        assert watch.session is not None
        launch = Launch(
            self.jit.__name__,
            watch.session.notes,
            watch.session.memory,
            (1, 1, 1) if plan else shape,
            is_virtual=plan is not None,
        )
        scope = interpreter._patch_lang(fn)
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
            for number, index in enumerate(programs):
                builder.set_grid_idx(*index)
                launch.begin(0 if plan else number, index)
                fn(**args)
        except Enough:
            pass
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


@dataclass(frozen=True, slots=True)
class _Accesses:
    """Loads, stores and atomics, each checked before it is made."""

    watch: Watch
    interpreter: Any

    def install(self, builder: Any) -> None:
        builder.create_masked_load = self._load
        builder.create_masked_store = self._store
        builder.create_atomic_rmw = self._rmw(builder.create_atomic_rmw)
        builder.create_atomic_cas = self._cas(builder.create_atomic_cas)
        if hasattr(builder, "create_atomic_store"):  # Triton 3.9
            builder.create_atomic_store = lambda _, ptr, val, mask, *rest: self._put("atomic store", ptr, val, mask)

    def _access(self, kind: Kind, ptr: Any, mask: Any, size: int, **more: Any) -> tuple[Array, Array]:
        launch = self.watch.launch
        assert launch is not None
        place = self.watch.stack.place()
        lanes = np.broadcast_to(_data(mask), ptr.data.shape).astype(bool)
        if stray := ptr.attr.get("strayed"):
            wrong = lanes & np.broadcast_to(stray.lanes, lanes.shape)
            if wrong.any():
                detail = (
                    f"an int32 offset wraps here: {stray.exact:,} becomes {stray.got:,}, and line {place.line} uses it "
                    f"({int(wrong.sum())} lanes of program {launch.index}): make it int64 before this"
                )
                launch.notes.add("offset-overflow", launch.kernel, stray.place, detail)
                lanes = lanes & ~wrong
        if known := getattr(mask, "attr", {}).get("wrapped"):
            wrong = _data(mask) != known.exact
            if not stray and wrong.any():
                detail = (
                    f"{known.words()}, and the mask of line {place.line} is wrong by it ({int(wrong.sum())} lanes of "
                    f"program {launch.index}): make it int64 before this"
                )
                launch.notes.add("offset-overflow", launch.kernel, known.place, detail)
        return launch.access(kind, ptr.data, lanes, size, place, **more)

    def _load(self, ptrs: Any, mask: Any, other: Any, *policy: Any, **named: Any) -> Any:
        kind = ptrs.get_element_ty()
        element = self.interpreter._get_np_dtype(kind)
        is_volatile = named.get("is_volatile", policy[-1] if policy else False)
        true, lanes = self._access("atomic load" if is_volatile else "load", ptrs, mask, element.itemsize)
        filler = np.zeros(ptrs.data.shape, element) if other is None else other.data
        return self.interpreter.TensorHandle(self.interpreter._interpreter.load(true, lanes, filler, element), kind)

    def _store(self, ptrs: Any, value: Any, mask: Any, *policy: Any, **named: Any) -> Any:
        return self._put("store", ptrs, value, mask)

    def _put(self, kind: Kind, ptrs: Any, value: Any, mask: Any) -> Any:
        element = self.interpreter._get_np_dtype(ptrs.get_element_ty())
        data = value.data if value.data.dtype.itemsize == element.itemsize else value.data.astype(element)
        true, lanes = self._access(
            kind, ptrs, mask, element.itemsize, values=data, current=lambda at: self._peek(at, data.dtype)
        )
        return self.interpreter._interpreter.store(true, data, lanes)

    def _peek(self, addresses: Array, kind: Any) -> Array:
        addresses = np.ascontiguousarray(addresses)
        yes, filler = np.ones(addresses.shape, bool), np.zeros(addresses.shape, kind)
        got: Array = self.interpreter._interpreter.load(addresses, yes, filler, kind)
        return got

    def _rmw(self, original: Callable[..., Any]) -> Callable[..., Any]:
        ops = self.interpreter._ir.ATOMIC_OP

        def create_atomic_rmw(builder: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
            kind = ptr.get_element_ty()
            size = self.interpreter._get_np_dtype(kind).itemsize
            true, lanes = self._access(
                "atomic", ptr, mask, size, reads=op != ops.XCHG, is_float_add=op == ops.FADD and kind.is_floating()
            )
            handle = self.interpreter.TensorHandle
            if not lanes.any():
                return handle(np.zeros(val.data.shape, val.data.dtype), val.dtype.scalar)
            return original(builder, op, handle(true, ptr.dtype), val, handle(lanes, mask.dtype), sem, scope)

        return create_atomic_rmw

    def _cas(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_atomic_cas(builder: Any, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
            size = self.interpreter._get_np_dtype(ptr.get_element_ty()).itemsize
            everywhere = self.interpreter.TensorHandle(np.ones(ptr.data.shape, bool), self.interpreter.tl.int1)
            true, lanes = self._access("atomic", ptr, everywhere, size)
            handle = self.interpreter.TensorHandle
            if not lanes.all():  # it has no mask of its own; what it would compare is not there
                return handle(cmp.data.copy(), cmp.dtype.scalar)
            return original(builder, handle(true, ptr.dtype), cmp, val, sem, scope)

        return create_atomic_cas


def _data(mask: Any) -> Array:
    return np.asarray(mask if isinstance(mask, np.ndarray) else mask.data)  # Triton 3.6 passes bare arrays at times
