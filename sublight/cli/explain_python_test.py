"""A real script whose Python is slow: the report names its function, its line and what it does there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sublight.cli.explain_test import Say, here, say  # noqa: F401
from sublight.diagnose import fakes
from sublight.results import write_json

TRAIN = """\
import time, torch
net, x = torch.nn.Linear(16, 16), torch.randn(8, 16)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

def lengths(end):
    found = []
    while time.perf_counter() < end:
        found.append(len(found) + 1)
    return found

for step in range(40):
    lengths(time.perf_counter() + 0.01)  # as long on any machine: its samples are few
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_slow_python_is_named(say: Say, here: Path) -> None:  # noqa: F811
    pytest.importorskip("torch")
    (here / "train.py").write_text(TRAIN)
    write_json(fakes.limits("cpu").to_json(), here / "limits.json")
    status, out, _ = say("--limits", "limits.json", "--json", "found.json", "train.py")
    found = json.loads((here / "found.json").read_bytes())
    assert status == 0 and found["verdict"] == "host-bound"
    named = [  # on a busy machine another line, or another cause, may take as long
        (finding, words)
        for finding in found["findings"]
        for words in finding["evidence"]
        if words.startswith("lengths() in train.py:")
    ]
    assert len(named) == 1 and " of that Python time" in named[0][1], found["findings"]
    finding = named[0][0]
    assert {line["place"] for line in finding["sources"]} & {"train.py:7", "train.py:8"}
    assert "lengths() in train.py" in out
    assert "sublight-" not in found["source"]
