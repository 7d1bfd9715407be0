"""A function or module as CUDA graphs: one a kind of call, captured when it is warm, replayed from then on.

A call is warmed up by the user's own first calls, which run eagerly on a side stream and give their results; so nothing
runs twice, and a training step trains as often as it is called. The capture runs Python once and the GPU not at all;
the replay that follows it is that call's work. What cannot be captured runs eagerly, and says why once.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import inspect
import threading
import time
import types
import warnings
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch

from sublight import units
from sublight.errors import BadInput
from sublight.fix.graph import bucket as graph_bucket
from sublight.fix.graph.backend import Backend, Cuda, timed
from sublight.fix.graph.bucket import Fit
from sublight.fix.graph.guard import Effects, Guard, Outside, reach
from sublight.fix.graph.held import Buffer, Held, unfit
from sublight.fix.graph.key import Call, describe, gone_objects, shapes_text, tensors_in
from sublight.fix.graph.refuse import Refusal, Watch, difference, is_recorded, line_of, storage
from sublight.fix.graph.report import GraphReport
from sublight.fix.graph.store import Kind, Store, device_of

EXTRA = 3  # calls more than asked for that a function may need until it does the same twice
MISSES = 4  # graphs of one kind of call that may become useless before we stop
KINDS = 256  # kinds of calls that are remembered
_INSIDE: contextvars.ContextVar[bool] = contextvars.ContextVar("inside a graph's warm-up or capture", default=False)
_AS_A_TENSOR = ": make it a tensor on the GPU, changed in place"
_NO_GPU = "no GPU that torch can use here: every call runs as it is"


class Graph:
    """What `graph` gives: called like the function or module it is made of; attributes are that one's."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        buckets: Any = None,
        memory_budget: int | str = "2 GiB",
        warmup: int = 3,
        static_outputs: bool = False,
        backend: Backend | None = None,
    ) -> None:
        if not callable(fn):
            raise BadInput(f"graph takes a function or a module, not {type(fn).__name__}")
        if type(warmup) is not int or warmup < 1:
            raise BadInput(f"warmup={warmup!r} is too little: a call runs eagerly at least once before it is captured")
        options = {
            "buckets": buckets,
            "memory_budget": memory_budget,
            "warmup": warmup,
            "static_outputs": static_outputs,
            "backend": backend,
        }
        budget_bytes = _bytes(memory_budget)
        found = backend or (Cuda() if torch.cuda.is_available() else None)
        own: dict[str, Any] = {
            "_fn": fn,
            "_options": options,
            "_name": getattr(fn, "__qualname__", type(fn).__name__),
            "_buckets": graph_bucket.parse(buckets),
            "_backend": found,
            "_store": Store(found, budget_bytes) if found is not None else None,
            "_kinds": {},
            "_lock": threading.RLock(),
            "_warned": set(),
        }
        self.__dict__.update(own, __doc__=fn.__doc__, __name__=getattr(fn, "__name__", type(fn).__name__))
        with contextlib.suppress(TypeError, ValueError):
            self.__dict__["__signature__"] = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        backend = self._backend
        if torch.compiler.is_compiling() or backend is None or _INSIDE.get() or backend.is_capturing() or is_recorded():
            return self._fn(*args, **kwargs)
        call = describe(args, kwargs, backend.device_type)
        at = graph_bucket.fit(self._buckets, call) if self._buckets is not None else None
        key = call.key if at is None else graph_bucket.key_of(call, at)
        kind = self._kinds.get(key)
        if kind is not None and (kind.refusal is not None or kind.is_overlapped(call.tensors)):
            kind.calls += 1
            return self._fn(*args, **kwargs)
        with self._lock:
            kind = self._kinds.get(key) or self._new_kind(key, call, at)
            if kind.refusal is None:
                return self._run(kind, call, at, args, kwargs)
        return self._fn(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_fn"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_fn"], name, value)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else types.MethodType(self, owner)

    def __repr__(self) -> str:
        return f"sublight.graph({self._fn!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Graph:
        return Graph(copy.deepcopy(self._fn, memo), **self._options)

    def __reduce__(self) -> tuple[Any, ...]:
        options = {**self._options, "backend": None}
        return functools.partial(Graph, **options), (self._fn,)

    def report(self) -> GraphReport:
        """Graphs held, the memory of each, replays, time against eager, and why other calls run eagerly."""
        with self._lock:
            kinds = list(self._kinds.values())
            graphs = tuple(held.row(self._backend) for kind in kinds for held in kind.held)
            eager = tuple(kind.eager_row(self._options["warmup"]) for kind in kinds if not kind.held)
            notes = [_NO_GPU] if self._backend is None else []
            store = self._store or Store(Cuda(), _bytes(self._options["memory_budget"]))
            if store.evictions > len(graphs) > 0:
                notes.append("graphs are let go as fast as they are made: raise memory_budget, or use buckets")
            return GraphReport(
                name=self._name,
                graphs=graphs,
                eager=eager,
                budget_bytes=store.budget_bytes,
                pool_bytes=store.pool_bytes,
                captures=store.captures,
                evictions=store.evictions,
                notes=tuple(notes),
            )

    def clear(self) -> None:
        """Let every graph go, and its memory; the next calls warm up again."""
        with self._lock:
            if self._store is not None:
                self._store.clear()
            self._kinds.clear()

    def _new_kind(self, key: Hashable, call: Call, at: Fit | None) -> Kind:
        for old in [old for old in self._kinds if gone_objects(old)]:
            self._forget(old)
        if len(self._kinds) >= KINDS:
            self._forget(next(iter(self._kinds)))
        kind = self._kinds[key] = Kind(call=shapes_text(call) + (f" → {at.size}" if at is not None else ""))
        if reason := call.reason or unfit(call):
            self._refuse(kind, Refusal(reason=reason))
        return kind

    def _forget(self, key: Hashable) -> None:
        kind = self._kinds.pop(key)
        self._store.drop(kind, kind.held)

    def _run(self, kind: Kind, call: Call, at: Fit | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind.calls += 1
        for held in kind.held:
            if held.is_for(call.tensors) and not (held.guard.changed() or held.guard.moved() or held.effects.missing()):
                return self._replay(kind, held, call, at)
        if kind.held and not kind.is_changed:
            self._missed(kind)
        if kind.refusal is not None:
            return self._fn(*args, **kwargs)
        if not kind.is_settled:
            return self._warm(kind, call, at, args, kwargs)
        if kind.eager_s is None and self._options["warmup"] > 1:
            return self._time(kind, call, at, args, kwargs)
        return self._capture(kind, call, at, args, kwargs)

    def _replay(self, kind: Kind, held: Held, call: Call, at: Fit | None) -> Any:
        self._store.used(held)
        if held.replays == MISSES:
            kind.misses = 0
        self._backend.enter(self._store.pool, held.device)
        return held.replay(self._backend, call.tensors, at)

    def _missed(self, kind: Kind) -> None:
        """No graph fits: one that can never fit again goes, and the next call looks again at what it does."""
        held = kind.held[-1]
        moved = held.guard.moved()
        label = moved or held.guard.changed() or ("a gradient" if held.effects.missing() else "")
        self._store.drop(kind, [each for each in kind.held if each.guard.moved()])
        kind.misses += 1
        kind.is_changed = True
        if label:
            kind.is_settled, kind.watch, kind.before = False, None, None
            kind.watched = max(self._options["warmup"] - 2, 0)  # one look more
        if kind.misses > MISSES:
            what = (
                f"{label} is another in each call"
                if label
                else "an argument is written into, and lies elsewhere each time"
            )
            hint = _AS_A_TENSOR if label and not moved else ""
            self._store.drop(kind, kind.held)
            self._refuse(kind, Refusal(reason=what + hint))

    def _warm(self, kind: Kind, call: Call, at: Fit | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One eager call, listened to; the first of a bucket is not padded, and tells whether others may be."""
        is_first = at is not None and kind.dims is None
        tensors, args, kwargs = graph_bucket.as_run(call, None if is_first else at, args, kwargs)
        outside = reach(self._fn, call.objects)
        before, bound = outside.snapshot(), outside.bound()
        watch = Watch(tensors, self._backend.device_type)
        try:
            with self._alone(), self._backend.side(self._device(call)), self._backend.heard(watch.hear), watch:
                out = self._fn(*args, **kwargs)
        except Exception as error:
            kind.note = f"raised {type(error).__name__} while warming up"
            raise
        made = tensors_in(out)
        self._backend.hand_over(made)
        kind.written = tuple(storage(x) in watch.written for x in tensors)
        refusal = watch.refusal or watch.wait or self._unfit_result(watch, made)
        if at is not None and is_first:
            is_pure = not (watch.written or watch.is_random or watch.ran_backward or outside.optimizers)
            refusal = refusal or self._learn_bucket(kind, call, at, (args, kwargs), made, is_pure)
        else:
            kind.watched += 1
            unsettled = self._unsettled(kind, watch, outside, (before, bound), made)
            kind.is_settled = unsettled is None and kind.watched >= max(self._options["warmup"] - 1, 1)
            kind.watch, kind.before = watch, before
            if kind.watched >= self._options["warmup"] + EXTRA:
                refusal = refusal or unsettled
        if at is not None and not is_first and not kind.is_tried:
            kind.dims = graph_bucket.by_position(made, at)
        if refusal is not None:
            self._refuse(kind, refusal)
        return out if at is None or is_first else graph_bucket.cut(out, kind.dims or [], at)

    def _unsettled(
        self, kind: Kind, watch: Watch, outside: Outside, was: tuple[list[Any], list[Any]], made: list[torch.Tensor]
    ) -> Refusal | None:
        """Why this call is no pattern for the next."""
        before, bound = was
        if label := outside.counted(before):
            return Refusal(reason=f"{label} is counted on in each call, and a graph runs no Python")
        if label := next((label for label, now in outside.rebound(bound) if watch.made(now)), None):
            return Refusal(reason=f"{label} is bound to a new tensor in each call: write it in place, with copy_")
        if line := watch.left_behind([*made, *outside.kept()]):
            return Refusal(reason="it keeps a tensor beside its result: return it, or write it in place", line=line)
        found = difference(kind.watch, watch) if kind.watch is not None else None
        if found and kind.before is not None and (label := outside.counted(kind.before)):
            return Refusal(reason=f"{label} is another in each call{_AS_A_TENSOR}", line=found.line)
        return found

    def _unfit_result(self, watch: Watch, made: list[torch.Tensor]) -> Refusal | None:
        if any(x.device.type != self._backend.device_type and watch.made(x) for x in made):
            return Refusal(reason="it gives back a CPU tensor that it has computed")
        whole = watch.ran_backward and not isinstance(self._fn, torch.nn.Module)
        if not whole and any(x.requires_grad and x.grad_fn is not None for x in made):
            how = "call it under torch.no_grad(), or make a graph of the whole training step"
            return Refusal(reason=f"its result needs gradients: {how}")
        return None

    def _learn_bucket(
        self, kind: Kind, call: Call, at: Fit, given: Any, made: list[torch.Tensor], is_pure: bool
    ) -> Refusal | None:
        """How outputs follow inputs: from the rows padded and not, where one more run changes nothing."""
        if any(w and p for w, p in zip(kind.written, at.padded, strict=True)):
            return Refusal(reason="it writes into an argument that the bucket pads")
        kind.dims, kind.is_tried = [], is_pure and at.size > 1
        if not kind.is_tried:
            return None
        rows, n = call.tensors, min(at.n, at.size - 1)
        with self._alone(), self._backend.side(self._device(call)):
            if at.n == at.size:  # nothing was padded: try it with one row fewer
                rows = [graph_bucket.shortened(x, at) if p else x for x, p in zip(rows, at.padded, strict=True)]
                made = tensors_in(self._with(call, rows, given))
            rows = [graph_bucket.padded(x, at) if p else x for x, p in zip(rows, at.padded, strict=True)]
            dims = graph_bucket.follows(tensors_in(self._with(call, rows, given)), made, at, n)
        if isinstance(dims, str):
            return Refusal(reason=f"no bucket fits: {dims}")
        kind.dims = dims
        return None

    def _with(self, call: Call, tensors: list[torch.Tensor], given: Any) -> Any:
        args, kwargs = graph_bucket.put_in(call, tensors, *given)
        return self._fn(*args, **kwargs)

    def _time(self, kind: Kind, call: Call, at: Fit | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One eager call as the user would make it, for the report."""
        _, args, kwargs = graph_bucket.as_run(call, at, args, kwargs)
        with self._alone():
            eager = functools.partial(self._fn, *args, **kwargs)
            out, kind.eager_s, kind.launch_s = timed(self._backend, eager, self._device(call))
        self._backend.hand_over(tensors_in(out))
        return out if at is None else graph_bucket.cut(out, kind.dims or [], at)

    def _capture(self, kind: Kind, call: Call, at: Fit | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = kind.watch
        assert watch is not None
        outside, device, begin = reach(self._fn, call.objects), self._device(call), time.perf_counter()
        guard = Guard(outside, self._backend.device_type, ran_backward=watch.ran_backward)
        effects = Effects(outside, ran_backward=watch.ran_backward)
        buffers = [
            Buffer(x, in_place=written, shape=at.padded_shape(x) if at is not None and at.padded[i] else None)
            for i, (x, written) in enumerate(zip(call.tensors, kind.written, strict=True))
        ]
        for buffer, x in zip(buffers, call.tensors, strict=True):
            buffer.fill(x, at)
        fixed = graph_bucket.put_in(call, [buffer.x for buffer in buffers], args, kwargs)
        try:
            with self._alone():
                run = functools.partial(self._fn, *fixed[0], **fixed[1])
                self._backend.prepare(device)
                captured = self._backend.capture(run, self._store.the_pool(), device, watch.generators)
        except Exception as error:  # whatever it is, the call itself is still to be made
            effects.undo()
            why = (str(error).splitlines() or [""])[0]
            self._refuse(kind, Refusal(reason=f"capture failed: {type(error).__name__}: {why}", line=line_of(error)))
            return self._fn(*args, **kwargs)
        except BaseException:
            effects.undo()
            raise
        effects.end()
        held = Held(
            call=kind.call,
            device=device,
            buffers=buffers,
            captured=captured,
            guard=guard,
            effects=effects,
            outside=[*watch.outside.values(), *guard.held, *effects.held],
            dims=kind.dims or [],
            capture_s=time.perf_counter() - begin,
            eager_s=kind.eager_s,
            launch_s=kind.launch_s,
            static_outputs=self._options["static_outputs"],
            written=frozenset(watch.written),
        )
        self._store.add(kind, held)
        kind.is_changed = False
        result = self._replay(kind, held, call, at)
        if refusal := self._store.keep_budget(held):
            self._refuse(kind, refusal)
        return result

    def _refuse(self, kind: Kind, refusal: Refusal) -> None:
        kind.refusal, kind.watch = refusal, None
        if str(refusal) not in self._warned:
            self._warned.add(str(refusal))
            warnings.warn(f"sublight.graph: {self._name} runs eagerly: {refusal}", stacklevel=5)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other warm-up or capture, none inside this one, and no casts that autocast would keep beyond the call."""
        caches = torch.is_autocast_cache_enabled()
        with self._backend.exclusive():
            token = _INSIDE.set(True)
            torch.set_autocast_cache_enabled(False)
            try:
                yield
            finally:
                torch.set_autocast_cache_enabled(caches)
                _INSIDE.reset(token)

    def _device(self, call: Call) -> torch.device:
        return device_of(call.tensors, self._backend.device_type)


def graph(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Run a function or module as CUDA graphs, one for each kind of call; also as a decorator.

    Each kind (shapes, data types, strides, numbers, modes) runs eagerly `warmup` times, is captured in the call after,
    and replayed from then on, with results equal to eager's bit for bit. Arguments are copied in, results are copied
    out, so both may be changed and kept; with `static_outputs=True` results are the graph's own memory, which the next
    call overwrites. An argument that the function writes into is used where it lies. Objects that hold tensors (a
    StaticCache) and everything the function reads from outside are read in place, looked at before each replay, and
    captured again when they have moved. Python inside the function does not run in a replay: no prints, no hooks.

    `buckets`: True pads dimension 0 of the arguments with zeros to 1, 2, 4, 8, …, [8, 64] to these sizes,
    {"dim": 1, "sizes": [128, 256]} another dimension; rows that were added are cut off the results.
    `memory_budget` bounds what all graphs hold; the least recently used go first.

    A whole training step is a function that does forward, backward and optimizer.step(); the optimizer must keep its
    numbers on the GPU (sublight.AdamW does; of PyTorch's: capturable=True), a learning rate that changes is a tensor.
    What cannot be captured runs eagerly, with a warning that says why and where; `report()` tells all.

    >>> double = graph(lambda x: x * 2)
    >>> double(torch.ones(2)).tolist()
    [2.0, 2.0]
    """
    return functools.partial(graph, **options) if fn is None else Graph(fn, **options)


def _bytes(words: int | str) -> int:
    try:
        return units.parse_quantity(str(words))
    except ValueError as error:
        raise BadInput(f"memory_budget: {error}") from None
