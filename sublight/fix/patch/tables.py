"""Tables of a rotary embedding: where each angle stands in them, and whether those of a call are laid out so.

Our kernels read an angle once, where they expect it. A rotary embedding shows how it lays its tables out; but between
it and the function that turns, a model may make others of them, as one does for the two axes of an image.
"""

from __future__ import annotations

import ast
import copy
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Table = Literal["halves", "neighbours", "once"]  # where a table has an angle again: half a row on, next to it, nowhere
TOKENS, WIDTH = 3, 8  # of a trial
LOOKS = 8  # at the tables of calls of one size that the host waits for on a GPU: it waits for no later ones


def tables_of(module: torch.nn.Module) -> Iterator[Table]:
    """How the tables are laid out that a rotary embedding gives for (x, positions); nothing from other modules."""
    rates = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
    if not rates:
        return
    try:
        small = _on_cpu(copy.deepcopy(module))
    except Exception:  # whatever a stranger's module may hold
        return
    x, positions = torch.zeros(1, TOKENS, WIDTH), torch.arange(1, TOKENS + 1)[None]
    kinds = [name.removesuffix("_inv_freq") for name in rates if name.endswith("_inv_freq") and "original" not in name]
    for kind in kinds or [""]:
        try:
            cos, sin = small(x, positions, kind) if kind else small(x, positions)
        except Exception:  # whatever a stranger's forward may raise
            continue
        if cos.dim() == sin.dim() == 3:
            yield _layout(cos, sin)


def _on_cpu(module: torch.nn.Module) -> torch.nn.Module:
    """With some rates where it has none yet (meta): the layout of the tables is the same."""
    for part in module.modules():
        for name, x in part._buffers.items():
            if x is not None and x.is_meta:
                part._buffers[name] = torch.linspace(0.1, 1.0, x.numel()).view(x.shape).to(x.dtype)
    return module.to("cpu")


def _layout(*tables: torch.Tensor) -> Table:
    if any(x.shape[-1] % 2 for x in tables):
        return "once"
    if all(torch.equal(*x.chunk(2, -1)) for x in tables):
        return "halves"
    return "neighbours" if all(torch.equal(x[..., ::2], x[..., 1::2]) for x in tables) else "once"


@dataclass(slots=True)
class Looks:
    """Whether tables are laid out as `table` says, by their values: a forward may make others for other positions.

    The host waits for a GPU in the first calls of each size. Later answers are read when they have come: they are no
    reason to wait, and one that is bad is an error, since results before it are wrong.
    """

    table: Table
    times: Counter[Any] = field(default_factory=Counter)  # of each size and data type
    is_odd: bool = False  # some were not: no others are believed
    last: tuple[Any, ...] = ()  # the tables that were looked at last: all layers get the same
    coming: deque[tuple[Any, torch.Tensor]] = field(default_factory=deque)  # answers: when they are there, on the host

    def are_as_expected(self, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        if self.is_odd or self.table == "once":
            return not self.is_odd
        size = cos.shape[0], cos.shape[1].bit_length(), cos.shape[2], cos.dtype
        if self.last and all(
            one() is x and at == _version(x) for (one, at), x in zip(self.last, (cos, sin), strict=True)
        ):
            return True
        if cos.is_cuda and torch.cuda.is_current_stream_capturing():  # which a look would break
            return self.times[size] > 0  # calls of this size have been looked at, as a graph's warm-up was
        self._read_answers()
        self.times[size] += 1
        if cos.is_cuda and self.times[size] > LOOKS:
            is_good = is_laid_out(cos, self.table) & is_laid_out(sin, self.table)
            answer = is_good.to("cpu", non_blocking=True)  # into pinned memory
            self.coming.append((torch.cuda.current_stream(cos.device).record_event(), answer))
        elif not all(bool(is_laid_out(x, self.table)) for x in (cos, sin)):
            self.is_odd = True  # never false again: another thread may have found others
        self.last = tuple((weakref.ref(x), _version(x)) for x in (cos, sin))
        return not self.is_odd

    def _read_answers(self) -> None:
        while self.coming:
            try:
                event, answer = self.coming.popleft()
            except IndexError:  # another thread was quicker
                return
            if not event.query():
                self.coming.appendleft((event, answer))
                return
            if not bool(answer):
                self.is_odd = True
                self.coming.clear()
                raise RuntimeError(
                    "an earlier call's rotary tables do not repeat their angles, as those before it did, so what was "
                    "computed since then is wrong: run it again, which will take the model's own rotary function"
                )

    def __deepcopy__(self, memo: Any) -> Looks:
        return Looks(self.table)


def _version(x: torch.Tensor) -> int:
    """How often it was written to; what is made in inference mode does not count that."""
    return 0 if x.is_inference() else x._version


def is_laid_out(x: torch.Tensor, table: Table) -> torch.Tensor:
    """One truth value, where x is."""
    if x.shape[-1] % 2:
        return torch.zeros((), dtype=torch.bool, device=x.device)
    one, other = x.chunk(2, -1) if table == "halves" else (x[..., ::2], x[..., 1::2])
    return (one == other).all()


def is_handed_on(tree: ast.FunctionDef, name: str) -> bool:
    """Whether each call of the function `name` gets tables that this forward was given, or had from another module."""
    nodes = list(ast.walk(tree))
    plain = [
        target
        for node in nodes
        if isinstance(node, ast.Assign) and (isinstance(node.value, ast.Name) or _is_call_of_another(node.value))
        for target in ast.walk(ast.Tuple(node.targets))
    ]
    stored = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    known = {node.arg for node in nodes if isinstance(node, ast.arg)} | {node.id for node in stored}
    changed = {node.id for node in stored if node not in plain}
    calls = [node for node in nodes if isinstance(node, ast.Call) and _is_of(node, name)]
    tables = [each for call in calls for each in (*call.args[2:4], *_named_tables(call))]
    return all(isinstance(each, ast.Name) and each.id in known - changed for each in tables)


def _is_of(call: ast.Call, name: str) -> bool:
    return isinstance(call.func, ast.Name) and call.func.id == name


def _named_tables(call: ast.Call) -> list[ast.expr]:
    return [each.value for each in call.keywords if each.arg in ("cos", "sin")]


def _is_call_of_another(node: ast.expr) -> bool:
    """self.rotary(x, positions), of a module: not torch.cat(…), nor a tensor's method."""
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_method and isinstance(node.func.value, ast.Name) and node.func.value.id == "self"  # type: ignore[attr-defined]
