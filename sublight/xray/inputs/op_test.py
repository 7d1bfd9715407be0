"""An op is shown as a typical call runs it; what other calls run is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ASKED = """\
import json
from sublight.gpus import find
from sublight.ops import find as op
from sublight.xray.inputs.op import launches_of_op

def told(**words):
    found = launches_of_op(op("rms_norm"), find("h100"), **words)
    return {
        "kernels": [launch.kernel for launch in found.launches],
        "shapes": list(found.shapes), "others": dict(found.others), "unmet": dict(found.unmet),
    }

print(json.dumps({"plain": told(), "rare": told(kernel="_tile_kernel"), "at": told(shape="4096x4096")}))
"""


@pytest.fixture(scope="module")
def answers() -> Any:
    """In a process without the interpreter; nothing is compiled."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    own["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[3]), own.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, timeout=600, env=own)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_typical_call_has_one_shape_and_no_kernel_of_odd_rows(answers: Any) -> None:
    plain = answers["plain"]
    assert "_row_kernel" in plain["kernels"] and not {"_tile_kernel", "_stream_kernel"} & set(plain["kernels"])
    assert all(shape == plain["shapes"][0] for shape in plain["shapes"])
    assert "_stream_kernel" in plain["others"] and "_tile_kernel" in plain["unmet"]


def test_a_kernel_that_is_named_and_a_shape_that_is_given_are_shown(answers: Any) -> None:
    assert answers["rare"]["kernels"] == ["_tile_kernel"] and not answers["rare"]["unmet"]
    assert answers["at"]["shapes"][0] == {"rows": 4096, "cols": 4096} and not answers["at"]["others"]
