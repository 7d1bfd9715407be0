"""For all tests of graphs."""

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    """A fallback that a test does not expect is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="sublight.graph")
        yield
