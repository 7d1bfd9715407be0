"""Hot Python by name: which function, which line, what it does; the ops that ran there are no Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sublight.diagnose import fakes, python, python_advice, trainer
from sublight.diagnose.explain import explain
from sublight.diagnose.rules.data_loading import DATA_LOADING, workers_here
from sublight.diagnose.rules.host_bound import HOST_BOUND
from sublight.diagnose.rules.worker_restart import WORKER_RESTART
from sublight.trace.record import Kind, Trace

SCRIPT = """\
import torch

def positions(rows):
    found = []
    for row in rows:
        found.append(len(row))
    return torch.tensor(found)

def accuracy(rows):
    return rows[0]

def plain(rows):
    return rows[0]

for step in range(10):
    x = positions(rows)
    y = [n + 1 for n in rows]
    accuracy(rows)
    torch.save(x, "x.pt")
    print(step)
    plain(rows)
    loss.backward()
    optimizer.step()
"""
MAIN = ("train.py", "<module>", 16, 1)
MODULE_CALL = ("torch/nn/modules/module.py", "_call_impl", 1, 1)


def samples(*stacks: tuple[list[tuple[str, str, int, int]], int], waited: bool = False, **more: Any) -> dict[str, Any]:
    """Looks of 10 ms at these stacks, so many each, in 10 steps without the profiler."""
    frames = list(dict.fromkeys(frame for stack, _ in stacks for frame in stack))
    rows = [
        [0, 0, number, 10_000_000, 0 if waited else 10_000_000, 0]
        for number, (_, count) in enumerate(stacks)
        for _ in range(count)
    ]
    return {
        "frames": [list(frame) for frame in frames],
        "stacks": [[frames.index(frame) for frame in stack] for stack, _ in stacks],
        "threads": ["MainThread"],
        "labels": ["timed"],
        "rows": rows,
        "look_s": 0.0,
        "mine": [frame[0] == "train.py" for frame in frames],
        "steps": {"timed": 10},
        **more,
    }


def trace(meta: Any, **more: Any) -> Trace:
    """5 ms of Python and 1 ms of work a step."""
    machine = fakes.Machine()
    for _ in range(4):
        with machine.step():
            machine.python(5_000)
            machine.lookups(10)
            machine.sync()
    return machine.trace(samples=meta, **more)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_the_function_and_its_line_are_named() -> None:
    hot = [MAIN, ("train.py", "positions", 6, 3)]
    found = HOST_BOUND.check(fakes.case(trace(samples((hot, 30), ([MAIN], 10)))))
    assert found is not None
    assert found.title.startswith("positions() in train.py:6 goes over elements one by one in Python: 3.7")
    assert "takes 75 % of that Python time, 75 % on line 6" in found.evidence[1]
    assert "train.py:16 takes 25 % of that Python time" in found.evidence[2]
    assert [place for place, _ in found.at] == ["train.py:6 (positions)", "train.py:16 (<module>)"]
    assert "cumsum" in found.fix


def test_a_lambda_is_the_work_of_the_function_that_it_stands_in() -> None:
    inside = [("train.py", f"positions.<locals>.{name}", 6, 6) for name in ("<lambda>", "<lambda>.<locals>.<listcomp>")]
    own = [MAIN, ("train.py", "positions", 6, 3)]
    stacks = (*(([*own, each], 10) for each in inside), (own, 10), ([MAIN], 10))
    found = HOST_BOUND.check(fakes.case(trace(samples(*stacks))))
    assert found is not None and found.title.startswith("positions() in train.py:6")
    assert "takes 75 % of that Python time, 75 % on line 6" in found.evidence[1]
    assert [place for place, _ in found.at] == ["train.py:6 (positions)", "train.py:16 (<module>)"]


def named_and_left(*stacks: tuple[list[tuple[str, str, int, int]], int]) -> tuple[str, float]:
    """The title, and what of the Python time is there when the change is made."""
    case = fakes.case(trace(samples(*stacks)))
    found = HOST_BOUND.check(case)
    assert found is not None
    left, before = (float(model.before_s["python"].sum()) for model in (found.edit(case.model), case.model))
    return found.title, left / before


def test_only_the_time_that_is_named_is_saved() -> None:
    """7/10 in one function, with the line that it calls; the rest in six that are too small to be named."""
    hot, helper = [MAIN, ("train.py", "positions", 6, 3)], ("train.py", "helper", 99, 98)
    rest = [([("train.py", f"small_{n}", n, 1)], 5) for n in range(6)]
    for stacks in ([(hot, 70)], [(hot, 55), ([*hot, helper], 15)]):
        title, left = named_and_left(*stacks, *rest)
        assert title.endswith("in Python: 3.50 ms of each step") and left == pytest.approx(0.3)
    parts = [([("train.py", f"part_{n}", n, 1)], 20) for n in range(3)]
    title, left = named_and_left(*parts, *[([("train.py", f"small_{n}", n, 1)], 8) for n in range(5)])
    assert title.startswith("Python outside of torch takes 5.00 ms of each step, 20 % of it in part_")
    assert left == pytest.approx(0.4)


def test_ops_of_a_line_are_no_python() -> None:
    """40 ms of looks a step on each of two lines; 5/8 of a recorded step is Python, and the ops are one line's."""
    machine = fakes.Machine()
    with machine.step():
        machine.work("aten::mul", fakes.BIG, us=30_000)
        machine.python(50_000)
    with machine.step():
        machine.work("aten::mul", fakes.BIG, us=30_000)
        machine.python(50_000)
    one, other = [("train.py", "f", 6, 3)], [("train.py", "g", 10, 9)]
    sources = {"ops": ["aten::mul"], "index": [0], "source": ["train.py:6"], "module": [""]}
    case = fakes.case(machine.trace(samples=samples((one, 40), (other, 40)), sources=sources))
    assert case.attribution.place(int(case.attribution.top_ops[0]))[0] == "train.py:6"
    assert {spot.function: round(spot.share, 3) for spot in python.spots(case)} == {"g": 0.8, "f": 0.2}


def test_a_line_that_runs_every_step_from_a_library_tells_nothing() -> None:
    loop = ("transformers/trainer.py", "Trainer._inner_training_loop", 90, 1)
    slow, plain = ("transformers/trainer_pt_utils.py", "nested_detach", 7, 1), ("torch/nn/modules/module.py", "f", 9, 1)
    stacks = (([MAIN, loop, slow, plain], 30), ([MAIN, loop, plain], 10), ([MAIN, loop, ("train.py", "own", 6, 3)], 20))
    found = python.spots(fakes.case(trace(samples(*stacks))))
    assert [spot.function for spot in found] == ["nested_detach", "own", "Trainer._inner_training_loop"]
    assert [spot.file for spot in found][:2] == ["transformers/trainer_pt_utils.py", "train.py"]


def test_neither_pythons_own_library_nor_the_captures_is_named() -> None:
    """A whole step on one line of the script: what all looks have in common is that line."""
    ours = ("torch/nn/modules/module.py", "sublight_call", 3, 1)
    slow = [MAIN, ours, ("torch/nn/modules/module.py", "f", 9, 1), ("linecache.py", "checkcache", 72, 1)]
    own_work = [MAIN, ours, ("/x/sublight/sampling.py", "Sampler.start", 170, 1), ("threading.py", "wait", 327, 1)]
    found = python.spots(fakes.case(trace(samples((slow, 30), ([MAIN, ours], 10), (own_work, 500)))))
    assert [(spot.file, spot.line, spot.looks) for spot in found] == [("train.py", 16, 40)]
    assert [frame.function for frame in found[0].called] == ["f", "checkcache"]


@pytest.mark.parametrize("leaf", [("torch/autograd/graph.py", "_engine_run_backward", 9, 1)])
def test_where_the_engine_runs_no_python_does(leaf: tuple[str, str, int, int]) -> None:
    found = python.spots(fakes.case(trace(samples(([MAIN, leaf], 90), ([MAIN, ("train.py", "f", 6, 3)], 10)))))
    assert [(spot.function, spot.share) for spot in found] == [("f", 1.0)]


@pytest.mark.parametrize(
    ("stack", "kind"),
    [
        ([MAIN, ("train.py", "positions", 6, 3)], python_advice.LOOP),
        ([MAIN, ("train.py", "positions", 7, 3)], python_advice.BUILD),
        ([("train.py", "<module>", 17, 1)], python_advice.LOOP),  # a comprehension
        ([MAIN, ("train.py", "accuracy", 10, 9)], python_advice.METRIC),
        ([("train.py", "<module>", 19, 1), ("torch/serialization.py", "save", 9, 1)], python_advice.SAVE),
        ([("train.py", "<module>", 19, 1)], python_advice.SAVE),
        ([("train.py", "<module>", 20, 1)], python_advice.PRINT),
        ([MAIN, ("train.py", "plain", 13, 12), ("json/__init__.py", "dumps", 9, 1)], python_advice.WRITE),
        ([MAIN, ("train.py", "plain", 13, 12), ("json/__init__.py", "loads", 9, 1)], python_advice.DATA),
        ([MAIN, ("train.py", "plain", 13, 12)], python_advice.OTHER),  # the loop over the steps is none over rows
        ([MAIN, ("gone.py", "plain", 13, 12)], python_advice.OTHER),
        ([MAIN, ("train.py", "plain", 13, 12), ("tokenizers/x.py", "encode", 1, 1)], python_advice.TOKENISE),
        ([MAIN, ("train.py", "plain", 13, 12), ("json/decoder.py", "decode", 1, 1)], python_advice.DATA),
        ([MAIN, ("train.py", "plain", 13, 12), ("queue.py", "Queue.get", 1, 1)], python_advice.WAIT),
        ([("train.py", "<module>", 23, 1), ("torch/optim/optimizer.py", "step", 1, 1)], python_advice.OPTIMIZER),
        ([("train.py", "<module>", 23, 1)], python_advice.OPTIMIZER),
        ([("train.py", "<module>", 22, 1), ("torch/_tensor.py", "backward", 1, 1)], python_advice.CALL),
        ([MAIN, ("train.py", "plain", 13, 12), MODULE_CALL], python_advice.CALL),
        (
            [MAIN, ("train.py", "positions", 6, 3), MODULE_CALL],
            python_advice.LOOP,
        ),
        ([MAIN, ("train.py", "Net.forward", 13, 12)], python_advice.CALL),
        (  # a loop over layers
            [MAIN, ("train.py", "positions", 6, 3), ("train.py", "Layer.forward", 13, 12), MODULE_CALL],
            python_advice.CALL,
        ),
    ],
)
def test_what_it_does(stack: list[tuple[str, str, int, int]], kind: python_advice.Kind) -> None:
    data = samples((stack, 20))
    data["mine"] = [frame[0] in ("train.py", "gone.py") for frame in data["frames"]]
    case = fakes.case(trace(data))
    (spot,) = python.spots(case)
    assert python_advice.kind_of(spot, case.trace) == kind


def test_a_printed_tensors_ops_are_the_prints() -> None:
    """Its line is the script's `print(step)`; the ops of another line stay what they are."""

    def found(line: int) -> Any:
        machine = fakes.Machine()
        for _ in range(3):
            with machine.step():
                machine.python(200)
                for _ in range(20):
                    machine.work("aten::ne", (64,), us=20)
                    machine.python(5)
        sources = {"ops": ["aten::ne"], "index": [0] * 20, "source": [f"train.py:{line}"] * 20, "module": [""] * 20}
        return HOST_BOUND.check(fakes.case(machine.trace(sources=sources)))

    assert (
        found(20).title.startswith("train.py:20 prints tensors: 495 µs of each step") and "step % 100" in found(20).fix
    )
    assert found(21).title.startswith("Python outside of torch")


def test_what_a_step_needs_is_not_told_to_go_before_the_loop() -> None:
    step = [("train.py", "<module>", 23, 1), ("torch/optim/optimizer.py", "step", 1, 1)]
    change = HOST_BOUND.check(fakes.case(trace(samples((step, 20)))))
    assert change is not None and "before the loop" not in change.fix and "fused=True" in change.fix


@pytest.mark.parametrize(("own_looks", "load", "blamed"), [(0, 9.0, False), (0, 0.5, True), (9, 9.0, True)])
def test_on_a_crowded_cpu_torchs_own_python_is_not_blamed(own_looks: int, load: float, blamed: bool) -> None:
    machine = fakes.Machine()
    for _ in range(3):
        with machine.step():
            machine.python(5_000)
            machine.work("aten::ne", (64,), us=20)
    step = [("train.py", "<module>", 23, 1), ("torch/optim/optimizer.py", "step", 1, 1)]
    looks = samples((step, 20), ([MAIN, ("train.py", "positions", 6, 3)], own_looks))
    found = HOST_BOUND.check(fakes.case(machine.trace(samples=looks, load=load, cores=2)))
    assert (found is not None) == blamed


def test_the_users_own_python_comes_before_torchs() -> None:
    step = [("train.py", "<module>", 23, 1), ("torch/optim/optimizer.py", "step", 1, 1)]
    own = [MAIN, ("train.py", "positions", 6, 3)]
    change = HOST_BOUND.check(fakes.case(trace(samples((step, 60), (own, 40)))))
    assert change is not None and change.fix == python_advice.LOOP.fix
    assert change.title == "Python outside of torch takes 5.00 ms of each step, 40 % of it in positions() in train.py:6"
    _, left = named_and_left((step, 60), (own, 40))
    assert left == pytest.approx(0.6), "a step needs what torch's own Python takes"


def test_what_waits_is_no_loop() -> None:
    case = fakes.case(trace(samples(([MAIN, ("train.py", "positions", 6, 3)], 20), waited=True)))
    (spot,) = python.spots(case)
    assert python_advice.kind_of(spot, case.trace) == python_advice.WAIT
    busy = trace(samples(([MAIN, ("train.py", "positions", 6, 3)], 20), waited=True), load=9.0, cores=2)
    (spot,) = python.spots(fakes.case(busy))
    assert python_advice.kind_of(spot, busy) == python_advice.LOOP  # it did not wait: others had the cores


@pytest.mark.parametrize(
    "damage",
    [None, [], "x", {"mine": []}, {"steps": 3}, {"rows": [[1]]}, {"stacks": [[99]]}, {"frames": 7}, {"steps": {}}],
)
def test_damaged_samples_name_nobody(damage: Any) -> None:
    good = samples(([MAIN], 20))
    case = fakes.case(trace({**good, **damage} if isinstance(damage, dict) else damage))
    assert python.spots(case) == ()
    found = HOST_BOUND.check(case)
    assert found is not None and found.title.startswith("Python outside of torch takes")


def test_few_looks_tell_nothing() -> None:
    assert python.spots(fakes.case(trace(samples(([MAIN], python.FEWEST - 1))))) == ()
    engine = [MAIN, ("torch/autograd/graph.py", "_engine_run_backward", 9, 1)]  # no Python, so they do not count
    assert python.spots(fakes.case(trace(samples(([MAIN], python.FEWEST - 1), (engine, 30))))) == ()


def test_what_the_loader_does_in_this_process_is_named() -> None:
    machine = fakes.Machine()
    for _ in range(3):
        with machine.step():
            machine.load(5_000)
            machine.lookups(10)
            machine.sync()
    loader = ("torch/utils/data/dataloader.py", "__next__", 7, 1)
    item = [MAIN, loader, ("train.py", "Words.__getitem__", 10, 9), ("tokenizers/x.py", "encode", 1, 1)]
    case = fakes.case(machine.trace(samples=samples((item, 50), ([MAIN], 10)), cores=4))
    found = DATA_LOADING.check(case)
    assert found is not None
    assert "Words.__getitem__() in train.py:10 tokenises text: 100 % of the loading" in found.evidence
    assert "num_workers=3" in found.fix
    assert [spot.function for spot in python.spots(case)] == ["<module>"]  # that is no Python of the step


@pytest.mark.parametrize(
    ("line", "told"), [("out[row, at] = at", True), ("out[row, :at] = at", False), ("at + 1", False)]
)
def test_a_batch_that_is_filled_by_element_is_told_to_go_by_row(here: Path, line: str, told: bool) -> None:
    (here / "train.py").write_text(
        f"def pad(rows):\n    for row in rows:\n        for at in row:\n            {line}\n"
    )
    machine = fakes.Machine()
    for _ in range(3):
        with machine.step():
            machine.load(5_000)
            machine.lookups(10)
            machine.sync()
    stack = [MAIN, ("torch/utils/data/dataloader.py", "__next__", 7, 1), ("train.py", "pad", 4, 1)]
    found = DATA_LOADING.check(fakes.case(machine.trace(samples=samples((stack, 50)), cores=4)))
    assert found is not None and ("pad_sequence" in found.fix) == told


def test_the_trainers_own_argument() -> None:
    machine = fakes.Machine()
    for _ in range(3):
        with machine.step():
            machine.load(5_000)
            machine.lookups(10)
            machine.sync()
    trainer = ("transformers/trainer.py", "Trainer.train", 7, 1)
    found = DATA_LOADING.check(fakes.case(machine.trace(samples=samples(([MAIN, trainer], 10)), cores=8)))
    assert found is not None
    assert found.fix.startswith("TrainingArguments(..., dataloader_num_workers=7)") and not found.cure


def test_what_the_trainer_has_an_argument_for_is_that_argument() -> None:
    """Also where a trace says by its recorded functions alone that the Trainer runs the steps."""
    saves = [("transformers/trainer.py", "Trainer.train", 7, 1), ("train.py", "<module>", 19, 1)]
    found = explain([trace(samples((saves, 30)))], gpu="h200").findings[0]
    assert (found.id, found.fix) == ("host-bound", 'TrainingArguments(..., save_strategy="steps", save_steps=1000)')
    machine = fakes.Machine()
    assert not trainer.runs(machine.trace())
    with machine.range("/x/transformers/trainer.py(3812): training_step", Kind.PYTHON):
        machine.lookups(1)
    assert trainer.runs(machine.trace())
    compiled = "model = torch.compile(model)"
    assert trainer.fix("unfused-pointwise", compiled) == "TrainingArguments(..., torch_compile=True)"
    assert trainer.fix("unfused-pointwise", "y = F.gelu(x)") == "y = F.gelu(x)"


def test_workers_by_the_cores_there_are() -> None:
    """Another machine's trace may not say: then not by the cores of this one."""
    metas: list[dict[str, int]] = [{"cores": 2}, {"cores": 1}, {"cores": 96}, {"cores": 96, "cores_to_use": 8}, {}]
    assert [workers_here(fakes.case(trace(None, **meta))) for meta in metas] == [1, 1, 16, 7, 4]


def test_the_more_exact_looks_count_where_there_are_enough() -> None:
    data = samples(([MAIN, ("train.py", "late", 6, 3)], 60), ([MAIN, ("train.py", "exact", 10, 9)], 60))
    data["labels"], data["steps"] = ["timed", "sampled"], {"timed": 10, "sampled": 10}
    data["rows"] = [[*row[:5], int(row[2])] for row in data["rows"]]
    assert [spot.function for spot in python.spots(fakes.case(trace(data)))] == ["exact"]
    data["rows"] = data["rows"][:70]  # ten of them, which are too few
    assert {spot.function for spot in python.spots(fakes.case(trace(data)))} == {"late", "exact"}


def test_workers_that_start_anew_are_no_slow_workers() -> None:
    """5 ms of waiting a step, of which 4 are the start of workers."""
    machine = fakes.Machine()
    for _ in range(3):
        with machine.step():
            machine.load(5_000, "_MultiProcessingDataLoaderIter")
            machine.lookups(10)
            machine.sync()
    start = [MAIN, ("torch/utils/data/dataloader.py", "_MultiProcessingDataLoaderIter.__init__", 7, 1)]
    found = DATA_LOADING.check(fakes.case(machine.trace(samples=samples((start, 4)))))
    assert found is not None
    assert found.title.endswith("most of it for workers that start anew") and found.most_s == pytest.approx(0.001)
    found = DATA_LOADING.check(fakes.case(machine.trace()))
    assert found is not None and found.title.endswith("its workers are too slow")


def test_a_start_that_is_seen_once_never_saves_more_than_its_share() -> None:
    """60 looks at a start of workers between 40 at the steps: six tenths, whatever the timed steps took."""
    start = [MAIN, ("torch/utils/data/dataloader.py", "_MultiProcessingDataLoaderIter.__init__", 7, 1)]
    for stacks, once in ((([MAIN], 40), (start, 60)), True), (((start, 30), ([MAIN], 40), (start, 30)), False):
        case = fakes.case(trace(samples(*stacks)))
        found = WORKER_RESTART.check(case)
        assert found is not None and found.title.endswith("in each epoch: 60 % of the time")
        assert found.saving_s == pytest.approx(0.6 * case.step_s) and case.step_s < 0.06
        assert found.evidence[0].startswith("600 ms of 10 steps: 60 looks")
        assert ("seen once" in found.evidence[1]) == once
