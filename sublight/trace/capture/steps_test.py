"""The finder's choice between kinds of events, without torch; and what a capture adds to a file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from sublight.trace.capture.file import Counters, dynamo_meta, insert
from sublight.trace.capture.source import MARK, attribute
from sublight.trace.capture.steps import PATIENCE_CALLS, Kind, StepFinder


class Log:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def candidate(self, kind: Kind) -> None:
        self.heard.append(f"{kind}?")

    def settled(self, kind: Kind) -> None:
        self.heard.append(f"{kind}!")

    def boundary(self) -> None:
        self.heard.append("|")


KINDS: dict[str, Kind] = {"m": "module", "o": "optimizer", "s": "explicit"}


def heard(events: str) -> str:
    """The kind that is settled on after these events, and the boundaries from then on; `o1` is optimizer 1."""
    log = Log()
    finder = StepFinder(log)
    for event in events.split():
        finder.saw(KINDS[event[0]], int(event[1:] or 0))
    chosen = [i for i, word in enumerate(log.heard) if word.endswith("!")]
    return " ".join(log.heard[chosen[0] :]) if chosen else ""


@pytest.mark.parametrize(
    ("events", "result"),
    [
        ("o", ""),
        ("o o", "optimizer!"),
        ("o o o o", "optimizer! | |"),
        ("m o m o m o", "optimizer! |"),  # calls under an optimizer's steps do not count
        ("m m m o m m m o m", "optimizer!"),
        ("m m m", ""),  # an optimizer may come
        ("m m m m m", "module! |"),
        ("o1 o2 o1 o2 o1", "optimizer! |"),  # in turn: the first seen twice marks the steps
        ("o1 o2 o2 o1 o2", "optimizer! |"),
        ("m1 m2 m1 m2 m1 m2 m1 m2 m1", "module! |"),
        ("o s o s o", "explicit!"),
        ("s o s", "explicit!"),
        ("o o o s s s", "optimizer! | explicit! |"),  # the stronger takes over before anything is measured
        ("s o o o o o o o o o", "optimizer! |"),  # called once, and never again
        ("o m m m m m m m m m", "module! |"),
    ],
)
def test_which_kind_marks_the_steps(events: str, result: str) -> None:
    assert heard(events) == result


def test_an_optimizer_that_never_steps_is_known() -> None:
    """A loop over rows calls the module hundreds of times a step: its calls mark the steps, and that is said."""
    finder = StepFinder(Log())
    finder._has_optimizer = True
    for _ in range(PATIENCE_CALLS - 1):
        finder.saw("module", 1)
    assert finder.kind is None and not finder.awaits_optimizer
    finder.saw("module", 1)
    assert finder.kind == "module" and finder.awaits_optimizer
    for _ in range(2):
        finder.saw("optimizer", 2)
    assert finder.kind == "optimizer" and not finder.awaits_optimizer, "it came before anything was measured"


def test_an_evaluation_between_two_steps_is_no_row_of_steps() -> None:
    finder = StepFinder(Log())
    finder._has_optimizer = True
    for kind, key, times in (("module", 1, 1), ("optimizer", 2, 1), ("module", 1, 100)):
        for _ in range(times):
            finder.saw(kind, key)  # type: ignore[arg-type]
    assert finder.kind is None
    finder.saw("optimizer", 2)
    assert finder.kind == "optimizer"


def test_a_frozen_finder_hears_only_its_own() -> None:
    log = Log()
    finder = StepFinder(log)
    finder.saw("optimizer", 1)
    finder.saw("optimizer", 1)
    finder._frozen = True
    del log.heard[:]
    for kind, key in (("explicit", 0), ("explicit", 0), ("optimizer", 2), ("module", 3), ("optimizer", 1)):
        finder.saw(kind, key)  # type: ignore[arg-type]
    assert log.heard == ["|"]


def test_names_change_on_the_way() -> None:
    data = {"a": 1, "traceEvents": [{"ph": "X", "name": f"own#{n}", "ts": n} for n in (1, 2, 12)]}
    lines = json.dumps(data).replace("}, {", "},\n{").encode()
    target = io.BytesIO()
    insert(io.BytesIO(b" \n" + lines), target, {"version": 1}, rename={"own#1": "ProfilerStep#1", "own#2": ""})
    written = json.loads(target.getvalue())
    assert written["sublight"] == {"version": 1} and written["a"] == 1
    assert [(event["ph"], event["name"]) for event in written["traceEvents"]] == [
        ("X", "ProfilerStep#1"),
        ("M", ""),
        ("X", "own#12"),
    ]


def test_a_long_file_is_copied_whole() -> None:
    data = json.dumps({"traceEvents": [{"name": "x" * 100, "ts": n} for n in range(3000)]}).encode()
    target = io.BytesIO()
    insert(io.BytesIO(data), target, {})
    assert json.loads(target.getvalue()) == {"sublight": {}, **json.loads(data)}


def test_an_op_belongs_to_the_last_mark_on_its_thread(tmp_path: Path) -> None:
    def op(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid}

    file = tmp_path / "marked.json"
    events = [
        op("aten::early", 0, 1),
        op(f"{MARK}1", 2, 0.1),
        op("aten::outer", 3, 4),
        op("aten::inner", 4, 1),
        op("aten::other_thread", 4, 1, tid=2),
        op("a range", 3, 90, cat="user_annotation"),
        op(f"{MARK}0", 8, 0.1),
        op("autograd::engine::evaluate_function: X", 9, 1),
        op("aten::outer", 11, 1),
    ]
    file.write_text(json.dumps({"traceEvents": list(reversed(events))}))
    found = attribute(file, [("a.py:1", "net"), ("b.py:2", "")])
    assert [found.ops[number] for number in found.index] == [
        "aten::early",
        "aten::outer",
        "autograd::engine::evaluate_function: X",
        "aten::outer",
    ]
    assert found.source == ["", "b.py:2", "", "a.py:1"] and found.module == ["", "", "", "net"]


def test_what_the_compiler_did_in_the_window() -> None:
    start = Counters(compiles=1, compile_s=1.0, graph_breaks={"old": 2})
    begin = Counters(compiles=3, compile_s=5.0)
    end = Counters(compiles=5, compile_s=6.5, graph_breaks={"old": 2, "print": 1}, reasons=("a", "", "shape", ""))
    assert dynamo_meta(start, begin, end) == {
        "compiles_in_window": 2,
        "compile_s_in_window": 1.5,
        "compiles": 4,
        "graph_breaks": {"print": 1},
        "recompile_reasons": ["shape"],
    }
    assert dynamo_meta(start, end, end)["recompile_reasons"] == []
