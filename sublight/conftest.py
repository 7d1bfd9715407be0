"""Where there is no GPU, kernels run on the CPU through Triton's interpreter; it must be chosen before Triton loads."""

import hashlib
import os
import sys

import pytest


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


HAS_GPU = _has_gpu()
LONG = ("xray/compile_test", "docs_test", "ops/ops_test", "xray", "examples", "ops/", "fix/")
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def left_out(item: pytest.Item) -> bool:
    """On a CPU three of four tests of ops times shapes times types, half of an op's own; `make thorough` runs all."""
    if HAS_GPU or "SUBLIGHT_THOROUGH" in os.environ or "ops" not in item.path.parts or "[" not in item.name:
        return False
    return _die(item.nodeid, 4 if item.path.name == "ops_test.py" else 2) > 0


def _die(name: str, sides: int) -> int:
    """The same for a name every time, each side as often; of a plain checksum names alike would agree."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % sides


def _turn(item: pytest.Item) -> int:
    """Files that compile or start processes come first: the last one to end must be a short one."""
    name = str(item.path)
    return next((turn for turn, part in enumerate(LONG) if part in name), len(LONG))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    if dropped := [item for item in items if left_out(item)]:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if not left_out(item)]
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


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
    """The same numbers every time: the error rule compares with PyTorch's luck, too."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
