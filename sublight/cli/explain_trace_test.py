"""`explain TRACE` needs neither torch nor triton, with or without a GPU, nor what takes long to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "examples" / "recorded"
CHILD = """
import json, pathlib, sys, types

class Refuse:
    tried = []  # an import that somebody catches counts, too

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "pydantic") or name == "numpy.ma":
            self.tried.append(name)
            raise ImportError(f"{name} is imported")

def driver_of_an_h200():
    numbers = ("HandleByIndex HandleByUUID Count ClockInfo CurrentClocksThrottleReasons CurrPcieLinkGeneration "
               "CurrPcieLinkWidth MaxPcieLinkGeneration MaxPcieLinkWidth PowerManagementLimit "
               "PowerManagementDefaultLimit").split()
    answers = {f"nvmlDeviceGet{name}": 1 for name in numbers} | {"nvmlDeviceGetName": "NVIDIA H200", "nvmlInit": None}
    answers |= {"nvmlDeviceGetUUID": "GPU-1", "nvmlSystemGetDriverVersion": "570", "nvmlDeviceGetEccMode": [0, 0]}
    functions = {name: lambda *_, answer=answer: answer for name, answer in answers.items()}
    functions["nvmlDeviceGetComputeRunningProcesses"] = lambda *_: []
    return types.SimpleNamespace(NVMLError=RuntimeError, NVML_CLOCK_SM=1, **functions)

sys.meta_path.insert(0, Refuse())
if sys.argv.pop(1) == "gpu":
    sys.modules["pynvml"] = driver_of_an_h200()
from sublight.cli.main import main
try:
    main()
finally:
    status = pathlib.Path("/proc/self/status")  # its peak is of this program alone, unlike getrusage's
    lines = status.read_text().splitlines() if status.exists() else []
    peak = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")] or [0]
    print(json.dumps({"peak_kb": peak[0], "heavy": Refuse.tried}), file=sys.stderr)
"""


def explain(*words: str, machine: str = "none", folder: Path) -> tuple[str, dict[str, Any]]:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, machine, "explain", *words],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "SUBLIGHT_CACHE": str(folder / "cache"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    return child.stdout, json.loads(child.stderr.strip().splitlines()[-1])


@pytest.mark.parametrize("machine", ["none", "gpu"])
@pytest.mark.parametrize("trace", ["h200/launch_bound.json.gz", "cpu/unfused_norm.json.gz"])
def test_a_trace_is_explained_without_torch(trace: str, machine: str, tmp_path: Path) -> None:
    shown, child = explain(str(RECORDED / trace), machine=machine, folder=tmp_path)
    assert "ms" in shown or "µs" in shown
    assert child["heavy"] == []
    assert child["peak_kb"] < 80_000  # 52 MB here; with torch and triton it was 325
    assert len(list(tmp_path.glob("explain-*.html"))) == 1


def test_two_traces_are_compared_without_torch(tmp_path: Path) -> None:
    two = (str(RECORDED / "h200" / name) for name in ("launch_bound.json.gz", "healthy_graph.json.gz"))
    shown, child = explain("--diff", *two, folder=tmp_path)
    assert shown and child["heavy"] == []


def test_the_child_refuses_torch(tmp_path: Path) -> None:
    """The check itself can fail."""
    code = CHILD.replace("from sublight.cli.main import main", "import torch")
    child = subprocess.run([sys.executable, "-c", code, "none"], cwd=tmp_path, capture_output=True, text=True)
    assert child.returncode != 0 and "torch is imported" in child.stderr
