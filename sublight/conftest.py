"""Where there is no GPU, kernels run on the CPU through Triton's interpreter; it must be chosen before Triton loads."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


HAS_GPU = _has_gpu()
LONG = ("xray/compile_test", "docs_test", "ops/ops_test", "xray", "examples", "ops/", "fix/")
SIDES = {  # one case of so many is drawn, and one of three tests that have no cases
    **{"ops/ops_test": 28, "sublight/ops/": 14, "docs_test": 5},
    **{"learn/grade/check_test": 50, "learn/grade/cuda/": 30, "learn/grade/timed_test": 6},
    **{"extensions/ledger_test": 20, "extensions/ladders_test": 6},
    **{"extensions/projects/build_test": 40},
    **{"sublight/fix/": 12, "trace/capture/": 4, "trace/fuzz_test": 4, "sublight/cli/": 6, "examples/": 3},
    **{"sublight/engines/": 6, "learn/board/": 6, "extensions/demos/": 6, "extensions/transformer/": 6},
}
DEAR = {  # one test of so many
    **{"fix/cure/run_test": 4, "cli/explain_fix_test": 4, "cli/interrupt_test": 6, "train/parallel/parallel_test": 14},
}
COMPILE = ("sublight/xray/", "ops/compiled_test", "record/native_test")  # drawn by whole files …
EVERY_TIME = ("xray/compile_test",)  # … but this one runs every time: it says whether any kernel has changed
GPU_TEST_S = 30.0  # on a GPU as many cases of a test are drawn as take so long there …
CASE_S = 1.0  # … by the seconds of its `gpu_seconds` mark, or by these
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
CRASHED = pytest.StashKey[bool]()  # whether one of pytest's workers did
DEAR_S = 3.0  # a test whose cases take longer need not draw every op and data type: other tests cover them
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background job, and its children
os.environ["SUBLIGHT_LEARN_TIME"] = "0"  # other tests use the GPU at the same time: a time would say nothing
os.environ["SUBLIGHT_CHECK"] = "1"  # every explanation that a test makes is held against itself


def _commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        return found.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no commit"


os.environ.setdefault("SUBLIGHT_DRAW", _commit())  # pytest's workers inherit it, and so draw the same cases


def pytest_report_header() -> str:
    return f"cases drawn by {os.environ['SUBLIGHT_DRAW']}: SUBLIGHT_DRAW={os.environ['SUBLIGHT_DRAW']} takes the same"


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Most cases of tests that interpret kernels, compile or start processes, on a GPU of those with many cases: others
    at each commit. `make rest` runs those that `make test` left out, `make thorough` all of the ops."""
    wanted = os.environ.get("SUBLIGHT_CASES", "drawn")  # or: rest, all
    if wanted == "all":
        return []
    drawn = _drawn_on_a_gpu(items) if HAS_GPU else {item.nodeid for item in items if _is_drawn(item)}
    return [item for item in items if (item.nodeid in drawn) == (wanted == "rest")]


def _is_drawn(item: pytest.Item) -> bool:
    path = str(item.path)
    if item.get_closest_marker("alone"):
        return True
    if any(part in path for part in COMPILE):
        return any(part in path for part in EVERY_TIME) or _die(item.nodeid.split("::")[0], 4) == 0
    if part := next((part for part in DEAR if part in path), ""):
        return _die(item.nodeid, DEAR[part]) == 0
    part = next((part for part in SIDES if part in path), "")
    return not part or _die(item.nodeid, SIDES[part] if "[" in item.name else 3) == 0


def case_s(item: pytest.Item) -> float:
    """About how many seconds a case of this test takes on an H200."""
    mark = item.get_closest_marker("gpu_seconds")
    return float(mark.args[0]) if mark else CASE_S


def _drawn_on_a_gpu(items: Sequence[pytest.Item]) -> set[str]:
    """Of each test so many cases as take `GPU_TEST_S`, first of all such that each value of each parameter (an op, a
    data type, a layout) is in one of them; as many as that takes, unless the test is dear."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: _die(item.nodeid, 2**32)):
        tests.setdefault(item.nodeid.split("[")[0], []).append(item)
    drawn: set[str] = set()
    for cases in tests.values():
        room = max(1, int(GPU_TEST_S / case_s(cases[0])))
        values: set[str] = set()
        needed: list[str] = []
        others: list[str] = []
        for item in cases:
            new = {f"{name}={_value(value)}" for name, value in _parameters(item).items()} - values
            (needed if new else others).append(item.nodeid)
            values |= new
        most = room if case_s(cases[0]) > DEAR_S else max(room, len(needed))
        drawn.update([*needed, *others][:most])
    return drawn


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _value(value: object) -> str:
    """A parameter's value as text that is the same in every process: an op's or a function's name, else its repr."""
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)


def _die(name: str, sides: int) -> int:
    """The same for a name every time in a draw, each side as often; of a plain checksum names alike would agree."""
    return int.from_bytes(hashlib.sha256(f"{os.environ['SUBLIGHT_DRAW']} {name}".encode()).digest()[:4], "big") % sides


def _turn(item: pytest.Item) -> float:
    """Files that compile or start processes come first: the last one to end must be a short one. On a GPU: tests."""
    name = str(item.path)
    return -case_s(item) if HAS_GPU else next((turn for turn, part in enumerate(LONG) if part in name), len(LONG))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Tests of a file behind one that crashes its worker may never run: that is worse than a test that fails."""
    if error:
        node.config.stash[CRASHED] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(CRASHED, False):
        session.exitstatus = pytest.ExitCode.INTERRUPTED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if other := next((item.nodeid for item in items if ADDRESS.search(item.nodeid)), ""):
        raise pytest.UsageError(f"{other} is named after an address, another in each of pytest's workers: give its ids")
    items.sort(key=_turn)
    if dropped := left_out(items):
        config.hook.pytest_deselected(items=dropped)
        out = {item.nodeid for item in dropped}
        items[:] = [item for item in items if item.nodeid not in out]
    if until := float(os.environ.get("SUBLIGHT_UNTIL", 0)):
        for item in items:
            item.add_marker(pytest.mark.until(until))
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is left once a machine's time is up, and say so."""
    until = item.get_closest_marker("until")
    if until and time.time() > until.args[0]:
        pytest.skip("no time left on this machine")


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def kernels_take_small_calls() -> None:
    """What wins in eager mode depends on the host, and on whether the native path was built: tests are of our kernels,
    except those that ask for PyTorch where a call is small."""
    if call := sys.modules.get("sublight.ops.record.call"):
        vars(call)["SMALL_BYTES"] = 0


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed PyTorch's random numbers: the error rule compares ours with PyTorch's error, which varies with the draw."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
