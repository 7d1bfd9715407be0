"""Where there is no GPU, kernels run on the CPU through Triton's interpreter; it must be chosen before Triton loads."""

import os
import sys
import zlib

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
    """On a CPU five of six parametrised tests of the ops, which take ten minutes there; `make thorough` runs all."""
    thorough = HAS_GPU or "SUBLIGHT_THOROUGH" in os.environ
    return not thorough and "ops" in item.path.parts and "[" in item.name and zlib.crc32(item.nodeid.encode()) % 6 > 0


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
