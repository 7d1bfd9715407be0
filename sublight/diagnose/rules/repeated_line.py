"""repeated-line: one line of the user's runs ever so often in a step, each time on a little."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sublight import units
from sublight.diagnose import recurrence
from sublight.diagnose.case import Case, Change, Edit, Rule, drop, fuse
from sublight.diagnose.model import Model
from sublight.diagnose.rules.small_grid import over_pieces
from sublight.diagnose.source import PLACE, text_of
from sublight.trace.intervals import distinct
from sublight.trace.record import NONE, Ints, Kind

OFTEN = 64  # times a step
LAYERS = 0.25  # modules a round: with as many, the rounds are layers, each of which needs the one before
REACHED = 0.6  # of the limit, by one op over all rows
LOOKED_UP = 30_000  # ops whose place is looked up
GATES, PRODUCTS = ("tanh", "sigmoid"), ("linear", "matmul", "mm", "addmm", "bmm", "addmv", "mv")
CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


@dataclass(frozen=True, slots=True)
class _Line:
    place: str
    times: float  # a step
    names: tuple[str, ...]
    ops: frozenset[int]  # top-level rows, of all steps

    @property
    def recurs(self) -> bool:
        """A cell whose rounds wait for each other: products, and gates on them."""
        gates, products = (any(name in kind for name in self.names) for kind in (GATES, PRODUCTS))
        return (gates and products) or any(name in CELLS for name in self.names)


def check(case: Case) -> Change | None:
    lines = [line for line in _whole_cells(_lines(case)) if line.recurs or _batches(case, line)]
    if not lines:
        return None
    rows = case.model.event_row.tolist()
    ops_of = [(_top(case, row), _forward(case, row)) for row in rows]
    by_line = {
        line.place: np.array([at for at, ops in enumerate(ops_of) if not line.ops.isdisjoint(ops)]) for line in lines
    }
    line = max(lines, key=lambda line: len(by_line[line.place]))
    events: Ints = by_line[line.place].astype(np.int64)
    if not len(events):
        return None
    spent = case.device_s(events)
    return Change(
        title=f"{line.place.partition(' ')[0]} {'unrolls a recurrent cell: it ' if line.recurs else ''}runs "
        f"{units.count(line.times)} times a step, on a little each time",
        evidence=(
            f"{case.often(len(events))} {'kernels' if case.on_gpu else 'ops'} a step come from that line, "
            f"backward too, {units.text(spent, 's')} of {'device' if case.on_gpu else 'op'} time",
            f"ops: {', '.join(line.names[:6])}",
            *(("each round needs the one before: a recurrent cell",) if line.recurs else ()),
        ),
        fix=_RECURRENT if line.recurs else _BATCH,
        edit=_unrolled(case, events) if line.recurs else _batched(case, events),
        rows=np.array(sorted(line.ops), dtype=np.int64),
        at=((line.place, f"{units.count(line.times)} times a step"),),
    )


def _lines(case: Case) -> list[_Line]:
    """Lines that run so often in one module: the layers of a deep model share a line, and each is a module."""
    if not case.attribution.has_places:
        return []
    trace, tops = case.trace, case.inside(case.attribution.top_ops)
    tops = tops[trace.kind[tops] == Kind.OP]
    if not OFTEN * case.model.steps <= len(tops) <= LOOKED_UP:
        return []
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    rows: dict[str, list[int]] = defaultdict(list)
    for row in tops.tolist():
        if case.attribution.forward(row) >= 0:  # in backward: it goes with the forward's line, and is not its own
            continue
        source, module = case.attribution.place(row)
        if source:
            counts[source, module][trace.name_of(row).removeprefix("aten::")] += 1
            rows[source].append(row)
    modules = Counter(source for source, _ in counts)
    often: dict[str, float] = {}
    names: dict[str, tuple[str, ...]] = {}
    for (source, _), found in counts.items():
        times = _rounds(found) / case.model.steps
        if times >= max(OFTEN, often.get(source, 0.0)) and modules[source] < LAYERS * times:
            often[source] = times
    for source in often:
        together: Counter[str] = sum((found for (line, _), found in counts.items() if line == source), Counter())
        names[source] = tuple(name for name, count in together.most_common() if count >= OFTEN * case.model.steps)
    return [_Line(source, often[source], names[source], frozenset(rows[source])) for source in often]


def _rounds(counts: Mapping[str, int]) -> int:
    """How often a line ran, by the ops that it ran: `a[i] == b[i]` has two `select` in each round. As often as most of
    its ops; those that hardly ran are not the loop's.

    >>> _rounds({"select": 256, "argmax": 128, "eq": 128}), _rounds({"select": 256, "eq": 128})
    (128, 128)
    >>> _rounds({"mul": 100, "sum": 1, "div": 1})
    100
    """
    most = max(counts.values())
    often = Counter(count for count in counts.values() if count > most / 4)
    return min(often, key=lambda count: (-often[count], count))


def _whole_cells(lines: list[_Line]) -> list[_Line]:
    """Lines that run equally often are one loop's: where they are a cell together, they are one line, their longest."""
    loops: dict[tuple[str, float], list[_Line]] = defaultdict(list)
    for line in lines:
        loops[line.place.partition(":")[0], line.times].append(line)
    found: list[_Line] = []
    for loop in loops.values():
        most = max(loop, key=lambda line: len(line.ops))
        names = tuple(dict.fromkeys(name for line in loop for name in line.names))
        whole = _Line(most.place, most.times, names, frozenset().union(*(line.ops for line in loop)))
        found += [whole] if whole.recurs else loop
    return found


def _batches(case: Case, line: _Line) -> bool:
    """Whether all rounds can be one op: they take a tensor apart, and none needs the one before."""
    match = PLACE.match(line.place)
    readable = match and text_of(case.trace, match["file"], int(match["line"]))
    if match and readable and recurrence.recurs(match["file"], int(match["line"])):
        return False
    return over_pieces(case, line.times)


def _top(case: Case, row: int) -> int:
    chain = case.attribution.ops_above(row)
    return chain[-1] if chain else row


def _forward(case: Case, row: int) -> int:
    """The forward op that an op of the backward pass belongs to: both count for the line."""
    found = case.attribution.forward(row)
    return _top(case, found) if found != NONE else NONE


def _batched(case: Case, events: Ints) -> Edit:
    """One launch for each op of the line, over all of its rounds."""
    together: dict[tuple[int, str], list[int]] = defaultdict(list)
    least: dict[tuple[int, str], float] = defaultdict(float)
    for event in events.tolist():
        number = int(case.model.item[event])
        item = case.items[number]
        key = (int(case.model.step[case.model.call[event]]), item.name)
        together[key].append(event)
        each = len(case.events_of[number])
        floor = item.floor_s / each / REACHED if item.floor_s is not None and each else float("inf")
        least[key] += min(floor, float(case.model.duration_s[event]))
    return fuse([(np.array(rounds), least[key]) for key, rounds in together.items()])


def _unrolled(case: Case, events: Ints) -> Edit:
    """As a library's recurrent layer: the products stay, each round after the last; all else goes into them."""
    heavy = np.array([case.items[int(case.model.item[event])].family == "matmul" for event in events.tolist()])
    products, others = events[heavy], events[~heavy]

    def edit(model: Model) -> Model:
        model = drop(model, others) if len(others) else model
        calls = distinct(model.call[products])
        launch, cost = model.before_s["launch"].copy(), model.cost_s.copy()
        launch[calls] = 0.0
        cost[calls] = 0.0
        return model.replace(cost_s=cost, before_s={**model.before_s, "launch": launch})

    return edit


_BATCH = """\
# one op over all rows, not one a row: the loop's dimension becomes one of the tensor's
y = (x * 2).relu()                         # not: torch.stack([(row * 2).relu() for row in x])
y = torch.bmm(a, b)                        # not: torch.stack([a[i] @ b[i] for i in range(n)])
# a function of one row: torch.vmap(function)(x)"""
_RECURRENT = """\
# the library's layer runs all rounds in few kernels, and the inputs' products at once
self.rnn = nn.LSTM(width, hidden, batch_first=True)      # or nn.GRU, nn.RNN: whichever says what the loop says
output, state = self.rnn(x)"""

REPEATED_LINE = Rule(id="repeated-line", check=check)
