"""Where a script's steps begin and end, found without changing it.

Three kinds of events can mark a step: calls of `sublight.step()`, steps of an optimizer, calls of the outermost
module. Of each kind the first object that is seen twice (that optimizer, that module) marks the steps, so that several
optimizers stepping in turn count once. The strongest kind wins; a weaker one waits while a stronger one may come.
Module calls are seen through `nn.Module.__call__`: the compiler looks past it, where a global hook would be compiled
into the model and its removal would compile it again.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from sublight.backend import private

Kind = Literal["explicit", "optimizer", "module"]
STRENGTH: tuple[Kind, ...] = ("explicit", "optimizer", "module")  # strongest first
STEPS_FROM: dict[Kind, str] = {
    "explicit": "sublight.step() calls",
    "optimizer": "optimizer steps",
    "module": "calls of the outermost module",
}
WHOLE_RUN = "the whole run"  # where no step was found
CALLS_TO_SETTLE = 4  # of a module: an optimizer that steps with every call has stepped by then
PATIENCE_CALLS = 256  # of a module that is being trained: gradients may be accumulated over many
PATIENCE_S = 20.0
CALL = "sublight_call"  # the name of our frames in a traceback that are not in our files


class Listener(Protocol):
    """Who is told of what the finder sees."""

    def candidate(self, kind: Kind) -> None:
        """The first object of this kind marked a boundary, and nothing is settled yet."""

    def settled(self, kind: Kind) -> None:
        """From now on this kind marks the steps; the event at hand is the first boundary."""

    def boundary(self) -> None:
        """One step ended and the next begins."""


@dataclass(kw_only=True)
class Seen:
    """What was seen of one kind."""

    counts: dict[int, int] = field(default_factory=dict)  # by id of the object
    leader: int | None = None  # the first object that was seen twice
    events: int = 0
    first_s: float = 0.0
    weaker_events: dict[Kind, int] = field(default_factory=dict)  # what the weaker kinds had seen when this one came

    def add(self, key: int) -> None:
        if not self.counts:
            self.first_s = time.monotonic()
        self.events += 1
        self.counts[key] = self.counts.get(key, 0) + 1
        if self.leader is None and self.counts[key] >= 2:
            self.leader = key

    @property
    def first(self) -> int | None:
        return next(iter(self.counts), None)


class StepFinder:
    """Watches one thread of this process; tells the listener where steps begin."""

    def __init__(self, listener: Listener) -> None:
        self.kind: Kind | None = None
        self._listener = listener
        self._seen: dict[Kind, Seen] = {kind: Seen() for kind in STRENGTH}
        self._thread = threading.get_ident()
        self._live = True
        self._frozen = False
        self._depth = 0
        self._call: Any = None  # nn.Module's own __call__, while ours stands in its place
        self._ours: Any = None
        self._hook: Any = None
        self._has_optimizer = False  # one lives: a module's calls are trained with it, or are of an evaluation between
        self.other_threads: list[str] = []  # that called modules, or stepped optimizers

    @property
    def awaits_optimizer(self) -> bool:
        """An optimizer exists that did not step, so that calls of the module had to mark the steps."""
        return self.kind == "module" and self._has_optimizer and not self._seen["optimizer"].counts

    def install(self) -> None:
        from torch.compiler import is_compiling
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not is_compiling():  # a compiled step does not come back here: its graph must hold nothing of ours
                self.saw("optimizer", id(optimizer))

        for function in (StepFinder.saw, StepFinder._is_mine, StepFinder._saw_elsewhere, in_compilation):
            leave_uncompiled(function)
        leave_uncompiled(StepFinder._look_for_training)
        self._hook = register_optimizer_step_post_hook(stepped)
        self._watch_every_call()

    def freeze(self) -> None:
        """The measured windows begin: no other kind can take over, and nothing else is watched."""
        self._frozen = True
        self._watch_leader_alone() if self.kind == "module" else self._unwatch_calls()

    def stop(self) -> None:
        """Nothing is reported any more. The optimizer's hook stays: to remove it may compile a step again."""
        self._live = False
        self._unwatch_calls()

    def remove(self) -> None:
        self.stop()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def saw(self, kind: Kind, key: int) -> None:
        """An event; on another thread, inside a compilation, or of a kind that no longer counts, it is nothing."""
        if threading.get_ident() != self._thread:
            self._saw_elsewhere()
            return
        if not self._live or in_compilation():
            return
        if self._frozen:
            if kind == self.kind and key == self._seen[kind].leader:
                self._listener.boundary()
            return
        seen = self._seen[kind]
        if not seen.counts:
            seen.weaker_events = {weaker: self._seen[weaker].events for weaker in STRENGTH[STRENGTH.index(kind) + 1 :]}
        seen.add(key)
        if self.kind == kind:
            if key == seen.leader:
                self._listener.boundary()
            return
        if self.kind is not None and STRENGTH.index(kind) > STRENGTH.index(self.kind):
            return
        if self.kind is None and key == seen.first:
            self._listener.candidate(kind)
        if key == seen.leader and not self._waits(kind):
            self.kind = kind
            self._listener.settled(kind)

    def _is_mine(self) -> bool:
        return self._live and threading.get_ident() == self._thread and not in_compilation()

    def _saw_elsewhere(self) -> None:
        name = threading.current_thread().name
        if self._live and not self._frozen and name not in self.other_threads:
            self.other_threads.append(name)

    def _waits(self, kind: Kind) -> bool:
        """Whether a stronger kind may still come."""
        mine = self._seen[kind]
        calls = mine.counts[mine.leader] if mine.leader is not None else 0
        is_patient = self._has_optimizer and calls < PATIENCE_CALLS and time.monotonic() - mine.first_s < PATIENCE_S
        for stronger in STRENGTH[: STRENGTH.index(kind)]:
            other = self._seen[stronger]
            if not other.counts:
                continue
            if stronger == "optimizer" and is_patient:  # a model is evaluated on many batches between two steps
                return True
            # seen once: it comes again after as many of mine as stood before it, or it never does
            if mine.events < 4 * (other.weaker_events.get(kind, 0) + 2):
                return True
        if kind != "module" or self._seen["optimizer"].counts:
            return False
        return calls < CALLS_TO_SETTLE or is_patient

    def _watch_every_call(self) -> None:
        from torch.compiler import is_compiling

        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            # traced: the graph must hold nothing of ours; no longer watched: a compiled model may have kept this call
            if is_compiling() or call is not self._ours:
                return original(module, *args, **kwargs)
            if threading.get_ident() != self._thread:
                self._saw_elsewhere()
                return original(module, *args, **kwargs)
            if not self._depth:
                self._look_for_training(module)
                self.saw("module", id(module))
            self._depth += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                self._depth -= 1

        original = self._replace_call(call)

    def _watch_leader_alone(self) -> None:
        """The cheapest watch: what is timed must not pay for the finding."""
        from torch.compiler import is_compiling

        leader, boundary = self._seen["module"].leader, self._listener.boundary

        def call(module: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling() and id(module) == leader and self._is_mine():
                boundary()
            return original(module, *args, **kwargs)

        self._unwatch_calls()
        original = self._replace_call(call)

    def _replace_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        # dynamo knows torch's own call by file and name; a model that is compiled meanwhile keeps ours, and must be
        # compiled as ever
        original = torch.nn.Module.__call__
        call.__name__ = original.__name__
        call.__code__ = call.__code__.replace(
            co_filename=torch.nn.modules.module.__file__, co_name=original.__name__, co_qualname=CALL
        )
        self._call, self._ours = original, call
        torch.nn.Module.__call__ = call  # type: ignore[method-assign]
        return original

    def _unwatch_calls(self) -> None:
        import torch

        if self._call is not None:
            torch.nn.Module.__call__ = self._call  # type: ignore[method-assign]
            self._call = self._ours = None

    def _look_for_training(self, module: Any) -> None:
        """Asked rarely, when a settlement is near: the whole heap is looked through."""
        calls = self._seen["module"].counts.get(id(module), 0) + 1
        if self.kind is None and calls >= CALLS_TO_SETTLE and calls & (calls - 1) == 0:
            self._has_optimizer = _an_optimizer_lives()


def in_compilation() -> bool:
    """Whether torch.compile is at work on this thread: it runs modules of its own, and what it has open must not be
    left behind by a profile that stops.
    """
    context = getattr(sys.modules.get("torch._guards"), "CompileContext", None)
    return context is not None and context.try_get() is not None


def _an_optimizer_lives() -> bool:
    from torch.optim import Optimizer

    return any(issubclass(type(thing), Optimizer) for thing in gc.get_objects())


def leave_uncompiled(function: Callable[..., Any]) -> None:
    """Dynamo compiles every Python frame inside a compiled region; ours, and what they call, run as they are."""
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        eval_frame = private.eval_frame
        skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
        eval_frame.set_code_exec_strategy(function.__code__, skip)
