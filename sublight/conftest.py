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
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def left_out(item: pytest.Item) -> bool:
    """On a CPU every second test of ops_test, of ops times shapes times data types; `make thorough` runs all."""
    thorough = HAS_GPU or "SUBLIGHT_THOROUGH" in os.environ
    return not thorough and item.path.name == "ops_test.py" and "[" in item.name and _coin(item.nodeid)


def _coin(name: str) -> bool:
    """The same for a name every time, and as often true as false; of a checksum's lowest bit ids alike would agree."""
    return hashlib.sha256(name.encode()).digest()[0] % 2 > 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
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
def seeded() -> None:
    """The same numbers every time: the error rule compares with PyTorch's luck, too."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
