"""dense-embedding: a step reads a few rows of a large embedding, and the optimizer goes over all of it."""

from __future__ import annotations

import math

import numpy as np

from sublight import units
from sublight.diagnose.case import Case, Change, Rule, edit_durations
from sublight.trace.record import Kind

LARGE_BYTES = 32 << 20  # of a table: smaller ones are no matter
FEW = 0.25  # of its rows: with more of them, a dense gradient is right


def check(case: Case) -> Change | None:
    table = _table(case)
    if table is None:
        return None
    rows, width, used, place = table
    chosen = sorted(case.in_optimizer)
    update = case.events(chosen)
    gradient = case.events([at for at, item in enumerate(case.items) if item.name in _BACKWARD])
    if not len(update) or not len(gradient):
        return None
    parameters = _parameters(case, chosen)
    share = min(rows * width / parameters, 1.0) if parameters else 1.0
    events = np.concatenate([update, gradient])
    kept = np.concatenate(
        [
            case.model.duration_s[update] * (1 - share * (1 - used / rows)),
            case.model.duration_s[gradient] * max(used / rows, 0.1),
        ]
    )
    spent = case.device_s(events)
    lines = case.lines(place)
    return Change(
        title=f"the optimizer goes over all {units.text(rows, '').strip()} rows of an embedding of which a step uses "
        f"{units.text(used, '').strip()} at most",
        evidence=(
            f"table of {rows} x {width}; {used} indices a step",
            f"its dense gradient and the update take {units.text(spent, 's')} a step; the table is "
            f"{units.percent(share)} of what is updated",
            *((f"at {lines}",) if lines else ()),
        ),
        fix=_FIX,
        edit=edit_durations(events, kept),
        rows=case.model.event_row[gradient],
        ops=("aten::embedding", "aten::embedding_dense_backward"),
    )


def _table(case: Case) -> tuple[int, int, int, list[int]] | None:
    """The largest table that a step uses few rows of: rows, width, indices a step, and the ops that look up."""
    trace, used = case.trace, dict[tuple[int, int], int]()
    places: dict[tuple[int, int], list[int]] = {}
    lookups = trace.rows_named(lambda name: name == "aten::embedding")
    low, high = case.steps.spans_ns[-1]
    for row in lookups[trace.kind[lookups] == Kind.OP].tolist():
        dims = trace.detail_of(row).dims
        if not low <= trace.start_ns[row] < high or len(dims) < 2 or len(dims[0]) != 2:
            continue
        if all(isinstance(size, int) for shape in dims[:2] for size in shape):
            shape = (int(dims[0][0]), int(dims[0][1]))
            used[shape] = used.get(shape, 0) + math.prod(dims[1])
            places.setdefault(shape, []).append(row)
    large = [
        shape for shape, count in used.items() if 4 * math.prod(shape) >= LARGE_BYTES and 0 < count <= FEW * shape[0]
    ]
    if not large:
        return None
    shape = max(large, key=math.prod)
    return *shape, used[shape], places[shape]


def _parameters(case: Case, chosen: list[int]) -> int:
    """Elements that the optimizer's largest op goes over in a step."""
    most = 0
    for at in chosen:
        item = case.items[at]
        if case.trace.kind[item.row] == Kind.OP and (dims := case.trace.detail_of(item.row).dims) and dims[0]:
            first = dims[0]
            if all(isinstance(size, int) for size in first):
                most = max(most, math.prod(first))
            else:
                most = max(most, sum(math.prod(shape) for shape in first if isinstance(shape, tuple)))
    return most


_BACKWARD = ("aten::embedding_dense_backward", "aten::embedding_backward")
_FIX = """\
table = nn.Embedding(rows, width, sparse=True)                 # its gradient holds the rows that were used
sparse = torch.optim.SparseAdam(table.parameters(), lr=1e-3)    # updates only these
dense = torch.optim.AdamW(the_other_parameters, lr=1e-3)
# this trains a little differently: the moments of rows that a step does not use stay as they are, and nothing decays"""

DENSE_EMBEDDING = Rule(id="dense-embedding", check=check)
