"""Where there is no GPU, kernels run on the CPU through Triton's interpreter; it must be chosen before Triton loads."""

import os

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"
