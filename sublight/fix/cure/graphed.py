"""A model's calls without gradients as CUDA graphs. A training step is the user's own function: not ours to wrap."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sublight.fix.cure import place
from sublight.fix.cure.first_call import at_first_call, has_parameters
from sublight.fix.cure.record import Changes, Cure, Edit

if TYPE_CHECKING:
    import torch

    from sublight.fix.graph.callable import Graph

NAME = "graph"
LINE = "step = sublight.graph(step)"
TRAINS = f"it trains, and its step is no one function that we could wrap from outside: put it in one, then {LINE}"


@contextlib.contextmanager
def install(changes: Changes) -> Iterator[None]:
    graphs: list[Graph] = []

    def act(models: list[torch.nn.Module]) -> None:
        for model in models:
            if has_parameters(model) and not hasattr(model, "_orig_mod"):  # a compiled one is its compiler's
                graphs.append(_wrap(model, changes))

    changes.left[NAME] = "no module was called without gradients"
    try:
        with at_first_call(act):
            yield
    finally:
        note_graphs(changes, graphs)


def note_graphs(changes: Changes, graphs: list[Graph]) -> None:
    """What became of the graphs, in words."""
    reports = [graph.report() for graph in graphs]
    captures = sum(report.captures for report in reports)
    if captures:
        changes.left.pop(NAME, None)
        changes.did[NAME] = f"{captures} graph{'s' * (captures > 1)} captured"
    elif reasons := [reason for report in reports for reason in (*(row.reason for row in report.eager), *report.notes)]:
        changes.left.setdefault(NAME, reasons[0])


def _wrap(model: torch.nn.Module, changes: Changes) -> Graph:
    import torch

    from sublight.fix.graph.callable import Graph

    own: Callable[..., Any] = model.forward
    graph, where = Graph(own), place.before_use(model)
    if where:
        text = f"{where[2]}.forward = sublight.graph({where[2]}.forward)"
        changes.edit(Edit(kind="before", file=where[0], line=where[1], text=text))

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            changes.left[NAME] = TRAINS
            return own(*args, **kwargs)
        if changes.left.get(NAME) != TRAINS:
            changes.left.pop(NAME, None)
        return graph(*args, **kwargs)

    model.forward = forward
    return graph


GRAPH = Cure(
    name=NAME,
    treats=("launch-bound",),
    line=LINE,
    where="around the function that makes a step, or model = sublight.graph(model) for inference",
    install=install,
    needs_gpu=True,
)
