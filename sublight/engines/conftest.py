"""Tiny models run on one thread: threads that wait for each other crawl on a busy machine."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
