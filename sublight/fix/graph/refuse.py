"""Why a call cannot become a graph, found while it runs eagerly: each operation passes here, and so does each wait.

A graph repeats launches and nothing else. So nothing may go to the host and back, no shape may hang on values, no CPU
tensor may change, and whatever a call leaves behind must be what it gives back.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sublight.backend import private
from sublight.fix.graph.key import tensors_in

_HERE = Path(__file__).parent
_TORCH = str(Path(torch.__file__).parent)
_OURS = (str(_HERE.parents[1] / "ops"), str(_HERE.parent / "patch" / "tables.py"))  # which know of captures
_MINE = tuple(str(_HERE / name) for name in ("callable.py", "backend.py", "refuse.py", "fake.py"))
_COPIES = ("aten::_to_copy", "aten::copy_", "aten::lift_fresh")
_SYNC = "called a synchronizing CUDA operation"
OPTIMIZER = "the optimizer keeps numbers on the CPU: give it capturable=True, or use sublight.AdamW"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why calls of one kind run eagerly, and the line of the user's that makes it so."""

    reason: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.line})" if self.line else self.reason


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a call: what must not change from call to call."""

    name: str
    given: Hashable
    line: str


class Watch(private.TorchDispatchMode):
    """Listens to one eager call."""

    def __init__(self, inputs: list[torch.Tensor], device_type: str = "cuda") -> None:
        super().__init__()
        self.device_type = device_type
        self.refusal: Refusal | None = None
        self.wait: Refusal | None = None  # where PyTorch tells of a wait and no operation explains it
        self.steps: list[Step] = []
        self.outside: dict[int, torch.Tensor] = {}  # what it reads that is neither an argument nor made by it
        self.written: set[int] = set()  # the storages it writes into that it has not made
        self.generators: list[torch.Generator] = []
        self.is_random = False
        self.ran_backward = False
        self._inputs = {storage(x) for x in inputs}
        self._made: set[int] = set()
        self._alive: list[tuple[weakref.ref[torch.Tensor], str]] = []
        self._thread = threading.get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True imports torch._dynamo with the first operation, which takes seconds

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what torch.compile has compiled stays compiled while we listen

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        line, is_ours = source_line(self._thread)
        given = tensors_in((args, kwargs))
        if not is_ours:  # our ops look whether they are captured, and do otherwise then
            self._judge_before(func, args, kwargs, given, line)
        out = func(*args, **kwargs)
        made = tensors_in(out)
        self._remember(func, args, kwargs, given, made, line)
        if not is_ours:
            self._judge_after(func, given, made, line)
            self.steps.append(Step(func.name(), self._signature((args, kwargs)), line))
        return out

    def refuse(self, reason: str, line: str) -> None:
        self.refusal = self.refusal or Refusal(reason=reason, line=line)

    def hear(self, reason: str, line: str) -> None:
        self.wait = self.wait or Refusal(reason=reason, line=line)

    def _judge_before(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], line: str) -> None:
        name, tags = func.name().split(".")[0], func.tags
        on_device = any(self._is_device(x) for x in given)
        if torch.Tag.data_dependent_output in tags and on_device:
            self.refuse("a value is read back to the host (item, bool, tolist), which waits for the GPU", line)
        elif torch.Tag.dynamic_output_shape in tags and on_device and _is_dynamic(name, args, kwargs):
            self.refuse(f"the shape of a result hangs on values ({name.removeprefix('aten::')})", line)
        if torch.Tag.nondeterministic_seeded in tags:
            self._judge_random(kwargs, given, line)

    def _judge_random(self, kwargs: dict[str, Any], given: list[torch.Tensor], line: str) -> None:
        self.is_random = True
        generator = kwargs.get("generator")
        on = (
            generator.device if generator is not None else kwargs.get("device") or (given[0].device if given else "cpu")
        )
        if torch.device(on).type != self.device_type:
            self.refuse("random numbers are drawn on the CPU, where a graph would repeat them", line)
        elif generator is not None and all(generator is not known for known in self.generators):
            self.generators.append(generator)

    def _judge_after(self, func: Any, given: list[torch.Tensor], made: list[torch.Tensor], line: str) -> None:
        on_device = [x for x in given if self._is_device(x)]
        on_host = [x for x in given if not self._is_device(x)]
        is_copy = func.name().split(".")[0] in _COPIES
        if on_device and any(not self._is_device(x) for x in made):
            self.refuse("a tensor is copied to the CPU, which waits for the GPU", line)
        elif on_host and (is_copy or any(x.numel() > 1 for x in on_host)) and any(map(self._is_device, made)):
            self.refuse("a tensor is copied from the CPU: a graph would read that memory again", line)
        elif is_copy and func.name().startswith("aten::lift_fresh") and on_device and self.device_type == "cuda":
            self.refuse("numbers are sent from the host (torch.tensor(…, device=GPU)): make them once, outside", line)

    def _remember(
        self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], made: list[torch.Tensor], line: str
    ) -> None:
        for x in given:
            if storage(x) not in self._made and storage(x) not in self._inputs:
                self.outside.setdefault(storage(x), x)
        for x in written_by(func, args, kwargs):
            if storage(x) not in self._made:
                self.written.add(storage(x))
                if not self._is_device(x):
                    is_optimizer = any("optim" in frame for frame in _torch_frames())
                    self.refuse(OPTIMIZER if is_optimizer else "a CPU tensor is changed, once a call", line)
        known = {storage(x) for x in given}
        for x in made:
            if storage(x) not in known:
                self._made.add(storage(x))
                self._alive.append((weakref.ref(x), line))
        self.ran_backward = self.ran_backward or private.graph_task() != -1

    def left_behind(self, kept: list[torch.Tensor]) -> str | None:
        """The line that made a tensor which outlives the call without being given back; `kept` may."""
        allowed = {storage(x) for x in kept} | self._inputs | set(self.outside)

        def find() -> str | None:
            for ref, line in self._alive:
                x = ref()
                if x is not None and storage(x) not in allowed and not any(ours in line for ours in _OURS):
                    return line
            return None

        return find() and (gc.collect(), find())[1]  # a cycle may hold it a little longer

    def made(self, x: torch.Tensor) -> bool:
        return storage(x) in self._made

    def _is_device(self, x: torch.Tensor) -> bool:
        return x.device.type == self.device_type

    def _signature(self, value: Any) -> Hashable:
        if isinstance(value, torch.Tensor):
            if value.dim() == 0 and not self._is_device(value) and value.device.type == "cpu":
                return "number", repr(value.item())
            return tuple(value.shape), value.dtype, value.device
        if isinstance(value, tuple | list):
            return tuple([self._signature(item) for item in value])
        if isinstance(value, dict):
            return tuple([(name, self._signature(item)) for name, item in value.items()])
        if isinstance(value, bool | int | str | torch.dtype | torch.device | None):
            return value
        return repr(value) if isinstance(value, float | complex | torch.layout) else type(value).__name__


def difference(before: Watch, after: Watch) -> Refusal | None:
    """The first operation that two calls of one kind do not share."""
    for one, other in zip(before.steps, after.steps, strict=False):
        if (one.name, one.given) != (other.name, other.given):
            what = "is given other numbers" if one.name == other.name else f"comes where {one.name} came before"
            return Refusal(reason=f"{other.name} {what} from call to call", line=other.line)
    if len(before.steps) != len(after.steps):
        longer = max(before.steps, after.steps, key=len)
        line = longer[min(len(before.steps), len(after.steps))].line
        return Refusal(reason="it does more in one call than in another", line=line)
    return None


def is_recorded() -> bool:
    """Whether somebody listens to, transforms or differentiates this very call: a replay would hide it from them."""
    return private.dispatch_modes() > 0 or private.transforms() is not None or private.graph_task() != -1


def storage(x: torch.Tensor) -> int:
    """What names the memory that tensors share."""
    try:
        return int(x.untyped_storage()._cdata)
    except NotImplementedError:  # a sparse tensor has none
        return id(x)


def written_by(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation writes into, as its schema says."""
    found: list[torch.Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found


def _is_dynamic(name: str, args: Any, kwargs: Any) -> bool:
    if name == "aten::index":  # by numbers its shape is known, by a mask it is not
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return not (name == "aten::repeat_interleave" and (kwargs.get("output_size") is not None))


@contextlib.contextmanager
def waits_heard(found: Callable[[str, str], None], set_mode: Callable[[int], None], mode: int) -> Iterator[None]:
    """Every wait for the GPU that PyTorch tells of (`set_sync_debug_mode`), with the line that makes it."""
    thread = threading.get_ident()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=f".*{_SYNC}.*")
        shown = warnings.showwarning

        def show(message: Any, *rest: Any, **named: Any) -> None:
            if _SYNC not in str(message):
                shown(message, *rest, **named)
            elif threading.get_ident() == thread:
                line, is_ours = source_line(thread)
                if not is_ours:
                    found("the host waits for the GPU", line)

        warnings.showwarning = show
        set_mode(1)
        try:
            yield
        finally:
            set_mode(mode)


def source_line(thread: int) -> tuple[str, bool]:
    """The innermost line that is neither PyTorch's nor this package's, and whether one of our ops' comes before it."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(2):
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(_OURS):
                return _place_of(name, frame.f_lineno, frame.f_code.co_name), True
            if not _is_inner(name):
                return _place_of(name, frame.f_lineno, frame.f_code.co_name), False
            frame = frame.f_back
        frame = sys._current_frames().get(thread)  # a thread of autograd's: where the caller waits for it
    return "", False


def line_of(error: BaseException) -> str:
    """The innermost line of the user's in a traceback."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not _is_inner(frame.filename):
            place = _place_of(frame.filename, frame.lineno or 0, frame.name)
    return place


def _torch_frames() -> Iterator[str]:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_TORCH):
            yield frame.f_code.co_filename[len(_TORCH) :]
        frame = frame.f_back


def _is_inner(name: str) -> bool:
    return name.startswith((_TORCH, *_MINE, "<")) or name.endswith(("contextlib.py", "functools.py", "warnings.py"))


def _place_of(name: str, line: int, function: str) -> str:
    return f"{name}:{line}, in {function}"
